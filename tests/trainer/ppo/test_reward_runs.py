"""Whole runs whose rewards fail, mix, or carry no signal."""

import json

import pytest
import torch
from helpers.rewards import fails_for_short_words
from helpers.run import make_trainer, read_metrics, roles, train

from lockstep.errors import RewardError
from lockstep.rewards.manager import RewardManager
from lockstep.single_controller.ray import RayWorkerGroup
from lockstep.utils.tokenizer import hf_tokenizer

POOL, HYBRID = {"global_pool": [1]}, roles("ActorRollout")
GRPO = ("algorithm.adv_estimator=grpo", "algorithm.use_kl_in_reward=false", "trainer.val_before_train=false")


def manager(config, compute_score, **arguments):
    return RewardManager(hf_tokenizer(str(config.actor_rollout_ref.model.path)), 0, compute_score=compute_score, **arguments)


def test_rows_without_a_reward_are_counted_recorded_and_leave_the_numbers(embedded_config):
    config = embedded_config(*GRPO, "trainer.total_training_steps=2", "reward.max_failure_rate=0.9")
    rows = train(config, POOL, HYBRID, reward_fn=manager(config, fails_for_short_words))
    recorded = [json.loads(line) for line in (config.trainer.run_dir / "reward_failures.jsonl").read_text().splitlines()]
    for row in rows:
        missing = [failure for failure in recorded if failure["batch"] == row["step"]]
        assert row["reward/missing/raised"] == len(missing) == 16 * row["reward/missing_ratio"] > 0
        assert all("too short" in f["error"] and len(f["reward_model"]["ground_truth"]) < 5 for f in missing)
        # The mean over the rows that have a reward is the rule's own.
        assert row["critic/score/mean"] == pytest.approx(row["reward/rule/mean"])
    assert {"response", "raw_prompt", "index", "data_source", "kind"} <= recorded[0].keys()


def test_too_many_missing_rewards_stop_the_run_with_examples_before_anything_is_updated(embedded_config):
    config = embedded_config(*GRPO, "trainer.total_training_steps=2", "reward.max_failure_rate=0.05")
    with pytest.raises(RewardError, match=r"max_failure_rate=0\.05(.|\n)*this word is too short for me"):
        train(config, POOL, HYBRID, reward_fn=manager(config, fails_for_short_words))
    recorded = [json.loads(line) for line in (config.trainer.run_dir / "reward_failures.jsonl").read_text().splitlines()]
    assert recorded
    assert all("too short" in failure["error"] for failure in recorded), "the failures that stopped the run are written down"


def test_a_run_in_which_every_reward_is_missing_changes_nothing(embedded_config):
    config = embedded_config(*GRPO, "trainer.total_training_steps=1", "reward.max_failure_rate=1.0", "trainer.save_freq=1")

    def fail(**row):
        raise ValueError("no")

    trainer = make_trainer(config, POOL, HYBRID, reward_fn=manager(config, fail))
    try:
        trainer.init_workers()
        trainer.fit()
    finally:
        trainer.close()
    (row,) = read_metrics(config)
    assert row["reward/missing_ratio"] == 1.0
    assert row["actor/grad_norm"] == 0.0
    assert not [
        name for name, value in row.items() if not isinstance(value, int | float)
    ]  # a number that is none is written as text
    assert trainer.drift.largest is None  # so the next step does not take the sampler for exact


def parity_reward(batch, return_dict=False):
    """Prompts with an even number have a signal: their first sample is better."""
    better = [i % 2 == 0 and s == 0 for i, s in zip(batch.non_tensor_batch["index"], batch.non_tensor_batch["sample"], strict=True)]
    tensor = torch.zeros(batch.batch["responses"].shape)
    lengths = batch.ragged("responses").lengths
    tensor[torch.arange(len(batch)), (lengths - 1).clamp(min=0)] = torch.tensor(better).float() * (lengths > 0)
    return {"reward_tensor": tensor, "reward_extra_info": {"acc": [float(b) for b in better]}}


DAPO = (*GRPO, "algorithm.filter_groups.enable=true", "algorithm.filter_groups.metric=acc")


def test_dynamic_sampling_fills_the_batch_with_groups_that_have_a_signal(embedded_config, tmp_path):
    samples_dir = f"trainer.rollout_data_dir={tmp_path / 'rows'}"
    config = embedded_config(*DAPO, "trainer.total_training_steps=2", "data.train_batch_size=4", samples_dir)
    rows = train(config, POOL, HYBRID, reward_fn=parity_reward)
    assert sum(row["training/num_gen_batches"] for row in rows) > len(rows)
    for row in rows:
        samples = (tmp_path / "rows" / f"{row['step']}.jsonl").read_text().splitlines()
        accuracies = [json.loads(line)["acc"] for line in samples]
        assert accuracies == [1.0, 0.0] * 4  # four groups, each with a better and a worse sample


def test_dynamic_sampling_resumes_where_it_stopped(embedded_config, tmp_path):
    def run(name, *overrides):
        config = embedded_config(
            *DAPO, "data.train_batch_size=4", "trainer.save_freq=1", f"trainer.default_local_dir={tmp_path / name}", *overrides
        )
        train(config, POOL, HYBRID, reward_fn=parity_reward)
        return read_metrics(config)

    whole = run("whole", "trainer.total_training_steps=3")
    run("cut", "trainer.total_training_steps=1")
    resumed = run("cut", "trainer.total_training_steps=3")
    # The schedule of the learning rate is constant, so the runs differ in nothing.
    for name in ("actor/grad_norm", "response_length/mean", "training/num_gen_batches"):
        assert [row[name] for row in resumed] == [row[name] for row in whole], name


def test_a_task_without_any_signal_stops_and_says_what_to_look_at(embedded_config):
    config = embedded_config(*DAPO, "algorithm.filter_groups.max_num_gen_batches=2")

    def constant(batch, return_dict=False):
        return {"reward_tensor": torch.zeros(batch.batch["responses"].shape), "reward_extra_info": {"acc": [1.0] * len(batch)}}

    with pytest.raises(RewardError, match="2 batches of prompts gave no group whose responses differ in 'acc'"):
        train(config, POOL, HYBRID, reward_fn=constant)


def test_overlong_responses_lose_reward(embedded_config):
    config = embedded_config(
        *GRPO, "trainer.total_training_steps=1", "reward.overlong_buffer.enable=true", "reward.overlong_buffer.len=11",
        "reward.overlong_buffer.penalty_factor=0.5",
    )  # fmt: skip
    (row,) = train(config, POOL, HYBRID)
    assert row["reward/overlong_penalty/mean"] < 0
    assert row["critic/score/mean"] == pytest.approx(row["reward/rule/mean"] + row["reward/overlong_penalty/mean"], abs=1e-5)


def test_gdpo_learns_from_the_penalty_for_length(embedded_config, tmp_path):
    def advantages(name, *keys):
        config = embedded_config(
            *GRPO, "trainer.total_training_steps=1", "reward.overlong_buffer={enable: true, len: 11, penalty_factor: 5}",
            "algorithm.adv_estimator=gdpo", f"trainer.default_local_dir={tmp_path / name}",
            "algorithm.gdpo_reward_keys=[rule, overlong_penalty]", "actor_rollout_ref.rollout.temperature=3", *keys,
        )  # fmt: skip
        return train(config, POOL, HYBRID)[0]["critic/advantages/max"]

    assert advantages("both") != advantages("rule alone", "algorithm.gdpo_reward_weights=[1.0, 0.0]")


class Listening(RewardManager):
    """Counts the responses that were heard of before generation ended."""

    heard = 0

    def begin(self, data):
        scoring, add = super().begin(data), None
        add = scoring.add

        def listen(row, ids):
            type(self).heard += 1
            add(row, ids)

        scoring.add = listen
        return scoring


@pytest.mark.ray
def test_responses_reach_the_rewards_of_the_driver_while_a_ray_worker_still_generates(embedded_config, ray_cluster, tmp_path):
    heard = []
    while not any(heard) and len(heard) < 3:  # a driver that gets no processor while the worker generates hears of none
        config = embedded_config(*GRPO, "trainer.total_training_steps=1", f"trainer.default_local_dir={tmp_path / str(len(heard))}")
        Listening.heard = 0
        train(config, POOL, HYBRID, RayWorkerGroup, reward_fn=Listening(hf_tokenizer(str(config.actor_rollout_ref.model.path)), 0))
        heard.append(Listening.heard)
    assert 0 < heard[-1] <= 16  # those that arrived before the call returned; the others are asked for after it
