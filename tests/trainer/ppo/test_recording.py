"""A recorded step: everything is in the folder, and the run does not notice."""

import math
import shutil

import pytest
import torch
from helpers.run import make_trainer, read_metrics, roles
from safetensors.torch import load_file

from lockstep.errors import DataError, RewardError
from lockstep.protocol import DataProto, Ragged
from lockstep.rewards.outcome import Failure
from lockstep.trainer.ppo.recording import add_baselines, load_recording, number_parts
from lockstep.trainer.ppo.rewards import Scored, leave_out

NOT_OF_THE_RUN = ("tim", "perf")


@pytest.fixture
def run(embedded_config, tmp_path):
    """Two steps of grpo with a token rejection; returns the metrics and the policy's weights before and after."""

    def train(name, *overrides):
        config = embedded_config(
            "trainer.total_training_steps=2", "trainer.val_before_train=false", "algorithm.adv_estimator=grpo",
            "algorithm.rollout_correction.rollout_rs=token_k1", "algorithm.rollout_correction.rollout_rs_threshold=1.0000001",
            "actor_rollout_ref.rollout.temperature=2.0",
            f"trainer.default_local_dir={tmp_path / name}", *overrides,
        )  # fmt: skip
        trainer = make_trainer(config, {"global_pool": [1]}, roles("ActorRollout", "RefPolicy"))
        try:
            trainer.init_workers()
            trainer.fit()
            (weights,) = trainer.actor_wg.export_weights()
            return read_metrics(config), dict(weights)
        finally:
            trainer.close()

    return train


def test_a_run_that_records_is_the_same_run(run, tmp_path, embedded_task):
    recorded, plain = (
        run("a", f"trainer.record_batch_dir={tmp_path / 'rec'}", "trainer.record_batch_freq=1"),
        run("b"),
    )
    for mine, other in zip(recorded[0], plain[0], strict=True):
        assert {k: v for k, v in mine.items() if not k.startswith(NOT_OF_THE_RUN)} == {
            k: v for k, v in other.items() if not k.startswith(NOT_OF_THE_RUN)
        }
    assert all(torch.equal(weight, plain[1][name]) for name, weight in recorded[1].items())

    first, second = (load_recording(tmp_path / "rec" / f"step_{step}") for step in (1, 2))
    with pytest.raises(DataError, match="step_1, step_2"):
        load_recording(tmp_path / "rec")
    batch = first.batch
    wanted = {"prompts", "responses", "response_mask", "rollout_log_probs", "token_level_scores", "old_log_probs", "ref_log_prob"}
    assert wanted | {"reward_baselines", "reward_parts"} <= set(batch.columns)
    assert not {"advantages", "returns", "rollout_is_weights"} & set(batch.columns)
    assert {"uid", "data_source", "index", "sample"} <= set(batch.non_tensor_batch)
    assert recorded[0][0]["rollout_corr/rollout_rs_masked_fraction"] > 0  # rounding is over so small a threshold
    assert batch.ragged("response_mask").values.all()  # before the rejection
    assert batch.meta_info["reward_part_names"]
    assert first.config.algorithm.adv_estimator == "grpo"
    # The policy that wrote the batch: before the first step the starting model, then another one.
    start = load_file(embedded_task.model / "model.safetensors")
    weights = [load_file(recording.model / "model.safetensors") for recording in (first, second)]
    assert all(torch.equal(weights[0][name], tensor) for name, tensor in start.items())
    assert not all(torch.equal(weights[1][name], tensor) for name, tensor in start.items())


def test_a_folder_that_is_no_recording_is_named(tmp_path):
    with pytest.raises(DataError, match="--record"):
        load_recording(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "config.yaml").write_text("")
    (tmp_path / "batch.pt").write_text("nothing")
    with pytest.raises(DataError, match="batch.pt cannot be read"):
        load_recording(tmp_path)
    shutil.rmtree(tmp_path / "model")
    with pytest.raises(DataError, match="no model"):
        load_recording(tmp_path)


def test_parts_are_what_is_a_number_in_every_row_that_has_a_reward():
    scored = Scored(
        failures=[None, Failure("raised", "x"), None],
        total=[1.0, 0.0, 2.0],
        extra={"score": [1.0, None, 2.0], "text": ["a", None, "b"], "some": [1.0, None, None], "aux": [math.nan, None, 1.0]},
        parts={"rule": [1.0, None, 0.0]},
    )
    assert number_parts(scored) == ["score", "rule"]


def test_a_missing_score_of_a_greedy_answer_takes_no_row_out_of_the_recorded_batch():
    def batch():
        rows = Ragged.from_rows([torch.ones(2), torch.ones(1), torch.zeros(1)])
        return DataProto.from_dict({"response_mask": rows}, {"uid": ["a", "a", "b"]})

    def greedy_baseline(recorded):
        recorded.set("reward_baselines", torch.tensor([0.0, 0.0, 0.5]))
        leave_out(recorded, torch.tensor([True, True, False]))

    def too_many(recorded):
        raise RewardError("2 of 2 rewards are missing")

    said = []
    recorded, without = batch(), batch()
    add_baselines(recorded, 3, greedy_baseline, said.append)
    assert recorded.ragged("response_mask").values.tolist() == [1, 1, 1, 0]
    assert torch.equal(recorded.batch["reward_baselines"].nan_to_num(-1), torch.tensor([-1.0, -1.0, 0.5]))
    assert not said
    add_baselines(without, 3, too_many, said.append)
    assert "reward_baselines" not in without
    assert "step 3" in said[0]
    assert "2 of 2" in said[0]
