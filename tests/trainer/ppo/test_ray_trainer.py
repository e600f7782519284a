"""The loop: what each switch of the configuration does to a run."""

import json
import shutil
from contextlib import contextmanager

import pytest
import torch
from helpers.rewards import length as count_words
from helpers.run import make_trainer, read_metrics, roles, train
from safetensors.torch import load_file

from lockstep.algorithms.advantages import ADV_ESTIMATORS
from lockstep.algorithms.policy_losses import POLICY_LOSSES
from lockstep.errors import ConfigError, DataError, ResourceError, RewardError
from lockstep.observability.metrics import Max
from lockstep.rewards.manager import RewardManager
from lockstep.single_controller.base import Dispatch, register
from lockstep.trainer.ppo.passes import Drift
from lockstep.trainer.role import Role
from lockstep.utils.tokenizer import hf_tokenizer
from lockstep.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker
from lockstep.workers.model_worker import MemoryWatch

POOL = {"global_pool": [1]}
HYBRID = roles("ActorRollout", "Critic", "RefPolicy")

ALWAYS = [
    "actor/pg_loss",
    "actor/pg_clipfrac",
    "actor/pg_clipfrac_lower",
    "actor/ppo_kl",
    "actor/entropy",
    "actor/loss",
    "actor/grad_norm",
    "actor/lr",
    "actor/reward_kl_penalty",
    "actor/reward_kl_penalty_coeff",
    "critic/vf_loss",
    "critic/vf_clipfrac",
    "critic/vpred_mean",
    "critic/grad_norm",
    "critic/lr",
    "critic/vf_explained_var",
    "critic/score/mean",
    "critic/score/max",
    "critic/score/min",
    "critic/rewards/mean",
    "critic/advantages/mean",
    "critic/returns/max",
    "critic/values/min",
    "response_length/mean",
    "response_length/max",
    "response_length/min",
    "response_length/clip_ratio",
    "prompt_length/mean",
    "prompt_length/max",
    "prompt_length/min",
    "prompt_length/clip_ratio",
    "response/aborted_ratio",
    "global_seqlen/min",
    "global_seqlen/max",
    "global_seqlen/minmax_diff",
    "global_seqlen/balanced_min",
    "global_seqlen/balanced_max",
    "global_seqlen/mean",
    "timing_s/gen",
    "timing_s/reward",
    "timing_s/ref",
    "timing_s/adv",
    "timing_s/update_critic",
    "timing_s/update_actor",
    "timing_s/update_weights",
    "timing_s/step",
    "timing_per_token_ms/gen",
    "timing_per_token_ms/update_actor",
    "perf/total_num_tokens",
    "perf/time_per_step",
    "perf/throughput",
    "training/global_step",
    "training/epoch",
]


def test_metrics_have_the_names_of_the_field(embedded_config):
    config = embedded_config("trainer.total_training_steps=1", "trainer.test_freq=1", "trainer.save_freq=1",
                             "actor_rollout_ref.rollout.val_kwargs={n: 2, temperature: 1.0}")  # fmt: skip
    before, step = train(config, POOL, HYBRID)
    missing = [name for name in ALWAYS if name not in step]
    assert not missing
    source = "val-core/lockstep/reverse/reward"
    assert {f"{source}/mean@2", f"{source}/best@2/mean"} <= before.keys() & step.keys()
    assert {"timing_s/old_log_prob", "timing_s/testing", "timing_s/save_checkpoint"} <= step.keys()
    assert {f"training/rollout_probs_diff_{kind}" for kind in ("max", "mean", "std")} <= step.keys()


THREE_STEPS = ("trainer.total_training_steps=3", "trainer.val_before_train=false")


@pytest.fixture(scope="module")
def plain(embedded_config_in, tmp_path_factory):
    """The metrics of three steps with no switch set."""
    return train(embedded_config_in(tmp_path_factory.mktemp("plain"), *THREE_STEPS), POOL, HYBRID)


def test_peaks_of_memory_are_told_of_every_stage_also_where_a_worker_learns_nothing(embedded_config, monkeypatch):
    """As if each worker had a process and a GPU of its own."""
    run, seen = MemoryWatch.stage, {}

    def remembered(self, name, *args):
        seen.setdefault(self, {})[f"perf/max_memory_allocated_gb/{name}"] = Max(1.0)
        return run(self, name, *args)

    monkeypatch.setattr(MemoryWatch, "stage", remembered)
    monkeypatch.setattr(MemoryWatch, "take_peaks", lambda self: seen.pop(self, {}))
    options = ("trainer.total_training_steps=1", "trainer.val_before_train=false", "critic.ppo_epochs=2")
    (row,) = train(embedded_config(*options), POOL, HYBRID)
    assert {f"perf/max_memory_allocated_gb/{name}" for name in ("gen", "ref", "values", "update_critic", "update_actor")} <= set(
        row
    )
    assert row["perf/max_memory_allocated_gb"] == 1.0


def test_a_batch_that_is_one_update_of_the_critic_has_no_pass_for_the_values(plain, embedded_config):
    """Where the batch is recorded there is one, and the run is the same to 1e-4 after two updates of the critic."""
    assert all("timing_s/values" not in row for row in plain)
    record = [f"trainer.record_batch_dir={embedded_config().trainer.run_dir}/batches", "trainer.record_batch_freq=1"]
    recorded = train(embedded_config(*THREE_STEPS, *record), POOL, HYBRID)
    assert all("timing_s/values" in row for row in recorded)
    for name in ("critic/vf_loss", "critic/values/mean", "critic/returns/mean", "critic/grad_norm", "actor/pg_loss"):
        assert [row[name] for row in plain] == pytest.approx([row[name] for row in recorded], rel=1e-4, abs=1e-5), name


def test_a_critic_with_an_update_of_its_own_is_asked_for_values_and_updates(embedded_config):
    """What a subclass replaces is not passed over."""
    calls = []

    class Own(TrainingWorker):
        @register(Dispatch.DP_COMPUTE_METRIC)
        def update_critic(self, mini_batch, denominators):
            calls.append(len(mini_batch))
            return super().update_critic(mini_batch, denominators)

    config = embedded_config("trainer.total_training_steps=1", "trainer.val_before_train=false")
    workers = {Role.ActorRollout: ActorRolloutRefWorker, Role.Critic: Own, Role.RefPolicy: ActorRolloutRefWorker}
    (row,) = train(config, POOL, HYBRID, role_worker_mapping=workers)
    assert calls == [config.data.train_batch_size * config.actor_rollout_ref.rollout.n]
    assert "timing_s/values" in row


def test_the_old_log_prob_pass_is_skipped_while_the_sampler_is_exact(plain):
    assert ["timing_s/old_log_prob" in row for row in plain] == [True, False, False]
    assert plain[0]["training/rollout_log_probs_diff_max"] < 2e-5


def test_the_old_log_prob_pass_is_never_skipped_with_a_bound_of_zero_and_the_run_is_the_same(plain, embedded_config):
    recomputing = train(embedded_config(*THREE_STEPS, "actor_rollout_ref.rollout.exactness_bound=0"), POOL, HYBRID)
    assert all("timing_s/old_log_prob" in row for row in recomputing)
    for name in ("critic/score/mean", "actor/grad_norm", "actor/pg_loss"):
        # Log-probs differ by float32 rounding, up to 2e-5; pg_loss is near zero, hence the absolute bound.
        assert [r[name] for r in plain] == pytest.approx([r[name] for r in recomputing], rel=1e-3, abs=1e-5), name


@contextmanager
def drifting_sampler(trainer):
    """The trainer's workers, which say log-probs that are 0.01 too low."""
    try:
        trainer.init_workers()
        generate = trainer.rollout_wg.generate_sequences

        def drifting(*args, **kwargs):
            data = generate(*args, **kwargs)
            data.ragged("rollout_log_probs").values.sub_(0.01)
            return data

        trainer.rollout_wg.generate_sequences = drifting
        yield
    finally:
        trainer.close()


def test_a_sampler_that_drifts_over_the_bound_switches_the_pass_back_on_and_says_so(embedded_config, capsys):
    trainer = make_trainer(embedded_config(*THREE_STEPS), POOL, HYBRID)
    trainer.drift.largest = 0.0
    with drifting_sampler(trainer):
        trainer.fit()
    assert ["timing_s/old_log_prob" in row for row in read_metrics(trainer.config)] == [False, True, True]
    assert "over rollout.exactness_bound=0.0001" in capsys.readouterr().out


ONE_UPDATE = (*THREE_STEPS, "algorithm.use_kl_in_reward=false", "actor_rollout_ref.actor.use_kl_loss=true")
COMPARED = [f"training/rollout_{name}" for name in (
    "ratio_max", "ratio_mean", "ratio_ess", "log_probs_diff_max", "probs_diff_max", "probs_diff_mean", "probs_diff_std"
)]  # fmt: skip


@pytest.mark.parametrize("bound", ["0", "1e-4"])
def test_the_one_update_of_a_batch_computes_its_old_log_probs_itself(embedded_config_in, tmp_path, monkeypatch, bound):
    """The same run as with a pass before it; what that pass tells of the sampler is told by the update."""
    overrides = (*ONE_UPDATE, f"actor_rollout_ref.rollout.exactness_bound={bound}")
    alone = train(embedded_config_in(tmp_path / "alone", *overrides), POOL, HYBRID)
    source = Drift.source
    monkeypatch.setattr(Drift, "source", lambda drift, step, num_updates, _: source(drift, step, num_updates, is_recorded=True))
    passing = train(embedded_config_in(tmp_path / "passing", *overrides), POOL, HYBRID)
    assert ["timing_s/old_log_prob" in row for row in passing] == ([True] * 3 if bound == "0" else [True, False, False])
    assert all("timing_s/old_log_prob" not in row for row in alone)
    for name in ("critic/score/mean", "actor/grad_norm", "actor/pg_loss", "actor/entropy", *COMPARED):
        assert [r[name] for r in alone] == pytest.approx([r[name] for r in passing], rel=1e-3, abs=2e-5), name


@pytest.mark.parametrize(
    ("overrides", "reads"),
    [
        (["actor_rollout_ref.actor.use_kl_loss=true"], False),
        (["algorithm.use_kl_in_reward=true"], True),
        (["actor_rollout_ref.actor.ppo_mini_batch_size=4"], True),
        (["actor_rollout_ref.actor.ppo_epochs=2"], True),
        (["trainer.critic_warmup=1"], True),
        (["trainer.record_batch_dir=batches"], True),
        (["algorithm.rollout_correction.rollout_is=token"], True),
        (["algorithm.adv_estimator=optimal_token_baseline", "critic.enable=false"], True),
        (["actor_rollout_ref.actor.policy_loss.loss_mode=kl_cov"], True),
        (["actor_rollout_ref.actor.policy_loss.loss_mode=gspo"], False),
    ],
)
def test_whoever_reads_old_log_probs_before_the_update_gets_a_pass(embedded_config, tmp_path, monkeypatch, overrides, reads):
    monkeypatch.chdir(tmp_path)
    one_step = ("trainer.total_training_steps=1", "trainer.val_before_train=false", "algorithm.use_kl_in_reward=false")
    (row,) = train(embedded_config(*one_step, *overrides), POOL, HYBRID)
    assert ("timing_s/old_log_prob" in row) == reads


def test_a_sampler_over_the_bound_is_told_once_where_the_update_computes_old_log_probs(embedded_config, capsys):
    trainer = make_trainer(embedded_config(*ONE_UPDATE), POOL, HYBRID)
    with drifting_sampler(trainer):
        trainer.fit()
    rows = read_metrics(trainer.config)
    assert all("timing_s/old_log_prob" not in row for row in rows)
    assert [row["training/rollout_log_probs_diff_max"] for row in rows] == pytest.approx([0.01] * 3, rel=1e-2)
    assert all(row["actor/log_ratio_max"] == 0.0 for row in rows)
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "exactness_bound" in line)
    assert line.endswith("old log-probs are those of the batch's one update itself")


def test_in_critic_warm_up_only_the_critic_learns(embedded_config, embedded_task):
    config = embedded_config(
        "trainer.total_training_steps=2", "trainer.critic_warmup=2", "trainer.val_before_train=false", "trainer.save_freq=2"
    )
    metrics = train(config, POOL, HYBRID)
    assert all("timing_s/update_actor" not in row and row["critic/grad_norm"] > 0 for row in metrics)
    saved = load_file(config.trainer.run_dir / "global_step_2" / "actor" / "model.safetensors")
    for name, tensor in load_file(embedded_task.model / "model.safetensors").items():
        assert torch.equal(saved[name], tensor), name


def test_epochs_and_mini_batches_are_optimizer_steps(embedded_config):
    more = [
        "trainer.total_training_steps=2", "trainer.val_before_train=false", "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "actor_rollout_ref.actor.ppo_epochs=3", "actor_rollout_ref.actor.shuffle=true", "critic.ppo_epochs=1",
        "actor_rollout_ref.actor.optim.lr_warmup_steps=1000", "critic.optim.lr_warmup_steps=1000",
    ]  # fmt: skip
    config = embedded_config(*more)
    metrics = train(config, POOL, HYBRID)
    # 8 prompts in mini-batches of 2, three times: 12 updates a step; the logged rate is their mean under a linear warm-up.
    for row, first in zip(metrics, (0, 12), strict=True):
        expected = sum(config.actor_rollout_ref.actor.optim.lr * (first + i + 1) / 1000 for i in range(12)) / 12
        assert row["actor/lr"] == pytest.approx(expected)
    assert metrics[0]["critic/lr"] == pytest.approx(config.critic.optim.lr * 2.5 / 1000)


SWITCHES = {
    "kl loss": (["actor_rollout_ref.actor.use_kl_loss=true", "algorithm.use_kl_in_reward=false"], ["actor/kl_loss", "actor/kl_coef"]),
    "entropy bonus": (["actor_rollout_ref.actor.entropy_coeff=0.01"], ["actor/entropy_loss"]),
    "grpo without a critic": (["algorithm.adv_estimator=grpo", "algorithm.use_kl_in_reward=false"], []),
    "hf rollout": (["actor_rollout_ref.rollout.name=hf"], []),
    "another aggregation": (["actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum-norm"], []),
    "top-p and top-k": (["actor_rollout_ref.rollout.top_p=0.9", "actor_rollout_ref.rollout.top_k=5"], []),
}  # fmt: skip
"""Name -> keys, and the metrics that are there only with them."""


@pytest.mark.parametrize("name", SWITCHES)
def test_a_switch_takes_effect_and_the_step_works(plain, embedded_config, name):
    overrides, logged = SWITCHES[name]
    config = embedded_config("trainer.total_training_steps=1", "trainer.val_before_train=false", *overrides)
    (row,) = train(config, POOL, HYBRID if config.use_critic else roles("ActorRollout"))
    assert [metric for metric in logged if metric not in row or metric in plain[0]] == []
    assert row["actor/grad_norm"] > 0
    # In the first step the policy is the reference, so that the KL loss has no gradient.
    assert (row["actor/grad_norm"] != pytest.approx(plain[0]["actor/grad_norm"], rel=1e-5)) == (name != "kl loss")
    assert ("critic/vf_loss" in row) == config.use_critic


def test_micro_batches_change_nothing(plain, embedded_config):
    sizes = ["actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=3", "critic.ppo_micro_batch_size_per_gpu=5"]
    (row,) = train(embedded_config("trainer.total_training_steps=1", "trainer.val_before_train=false", *sizes), POOL, HYBRID)
    for name in ("actor/pg_loss", "actor/grad_norm", "actor/entropy", "critic/vf_loss", "critic/grad_norm"):
        assert row[name] == pytest.approx(plain[0][name], rel=1e-4, abs=1e-6), name


ESTIMATOR_KEYS = {"gdpo": ["algorithm.gdpo_reward_keys=[rule, length]", "algorithm.gdpo_reward_weights=[1.0, 0.5]"]}


@pytest.mark.parametrize("estimator", sorted(set(ADV_ESTIMATORS) - {"gae", "tir_optimal_token_baseline", "distill"}))
def test_every_estimator_without_a_critic_trains(estimator, embedded_config):
    config = embedded_config(
        "trainer.total_training_steps=2", "trainer.val_before_train=false", "algorithm.use_kl_in_reward=false",
        f"algorithm.adv_estimator={estimator}", "actor_rollout_ref.rollout.n=4", *ESTIMATOR_KEYS.get(estimator, []),
    )  # fmt: skip
    tokenizer = hf_tokenizer(str(config.actor_rollout_ref.model.path))
    judges = RewardManager(tokenizer, 0, functions={"length": count_words}, weights={"*": {"rule": 1.0, "length": -0.1}})
    rows = train(config, POOL, HYBRID, **({"reward_fn": judges} if estimator == "gdpo" else {}))
    assert any(row["actor/grad_norm"] > 0 for row in rows)
    assert all("critic/vf_loss" not in row for row in rows)  # the mapped critic was not needed, so it was not started
    assert ("timing_s/gen_max" in rows[0]) == (estimator == "remax")  # the greedy baseline


@pytest.mark.parametrize("loss_mode", sorted(POLICY_LOSSES))
def test_every_policy_loss_trains(loss_mode, embedded_config):
    config = embedded_config(
        "trainer.total_training_steps=2", "trainer.val_before_train=false", "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        f"actor_rollout_ref.actor.policy_loss.loss_mode={loss_mode}",
    )  # fmt: skip
    assert all(row["actor/grad_norm"] > 0 for row in train(config, POOL, HYBRID))


def test_the_correction_weighs_and_rejects_what_a_drifting_sampler_drew(embedded_config):
    config = embedded_config(
        "trainer.total_training_steps=2", "trainer.val_before_train=false",
        "algorithm.rollout_correction={rollout_is: token, rollout_is_threshold: 1.005}",
        "algorithm.rollout_correction.rollout_rs=seq_mean_k1", "algorithm.rollout_correction.rollout_rs_threshold=1.02",
    )  # fmt: skip
    trainer = make_trainer(config, POOL, HYBRID)
    try:
        trainer.init_workers()
        generate = trainer.rollout_wg.generate_sequences

        def drifting(*args, **kwargs):
            data = generate(*args, **kwargs)
            column = data.ragged("rollout_log_probs")
            for number, row in enumerate(column.rows()):
                row.sub_(0.05 if number % 4 == 0 else 0.01)
            return data

        trainer.rollout_wg.generate_sequences = drifting
        trainer.fit()
    finally:
        trainer.close()
    for row in read_metrics(config):
        assert row["rollout_corr/rollout_rs_seq_masked_fraction"] == pytest.approx(0.25)
        assert row["rollout_corr/rollout_is_min"] == pytest.approx(1.005), "every ratio is above the threshold"
        assert row["rollout_corr/rollout_is_max"] == pytest.approx(1.005)
        assert row["actor/grad_norm"] > 0


def test_an_exact_sampler_makes_the_correction_the_identity(plain, embedded_config):
    on = ["algorithm.rollout_correction={rollout_is: sequence, rollout_rs: token_k1, rollout_rs_threshold: 1.01}"]
    corrected = train(embedded_config(*THREE_STEPS, *on), POOL, HYBRID)
    for name in ("critic/score/mean", "actor/grad_norm", "actor/pg_loss"):
        # In the first step the log-probs are recomputed and differ by float32 rounding, up to 2e-5.
        assert [r[name] for r in corrected] == pytest.approx([r[name] for r in plain], rel=1e-3, abs=1e-5), name
    assert corrected[2]["rollout_corr/rollout_is_max"] == 1.0
    assert corrected[2]["rollout_corr/rollout_rs_masked_fraction"] == 0.0


def test_bypass_mode_never_recomputes_old_log_probs(embedded_config, capsys):
    config = embedded_config(
        "trainer.total_training_steps=2", "trainer.val_before_train=false", "actor_rollout_ref.rollout.exactness_bound=0",
        "algorithm.rollout_correction.bypass_mode=true",
    )  # fmt: skip
    rows = train(config, POOL, HYBRID)
    assert all("timing_s/old_log_prob" not in row and row["actor/grad_norm"] > 0 for row in rows)
    assert "exactness_bound" not in capsys.readouterr().out


def test_the_adaptive_controller_moves_the_coefficient(embedded_config):
    config = embedded_config("trainer.total_training_steps=3", "trainer.val_before_train=false", "algorithm.kl_ctrl.type=adaptive",
                             "algorithm.kl_ctrl.horizon=1000", "algorithm.kl_ctrl.target_kl=1.0")  # fmt: skip
    coefficients = [row["actor/reward_kl_penalty_coeff"] for row in train(config, POOL, HYBRID)]
    # The KL is far under its target, so each of 16 rows takes the clipped -0.2 / 1000 off.
    assert coefficients == pytest.approx([0.001 * (1 - 0.2 * 16 / 1000) ** step for step in range(3)])


def test_the_last_step_is_saved_and_validated_by_default_and_the_same_command_again_says_there_is_nothing_to_do(
    embedded_config, capsys
):
    defaults = ["trainer.total_training_steps=3", "trainer.save_freq=-1", "trainer.test_freq=-1", "trainer.val_before_train=false"]
    config = embedded_config(*defaults)
    rows = train(config, POOL, HYBRID)
    assert [any(name.startswith("val-core/") for name in row) for row in rows] == [False, False, True]
    assert [path.name for path in config.trainer.run_dir.glob("global_step_*")] == ["global_step_3"]
    assert len(train(embedded_config(*defaults), POOL, HYBRID)) == 3
    assert "nothing to train: the checkpoint is at step 3 of 3" in capsys.readouterr().out


def test_a_model_that_cannot_be_loaded_leaves_no_worker_behind(embedded_config, tmp_path):
    folder = tmp_path / "without_weights"
    config = embedded_config()
    shutil.copytree(config.actor_rollout_ref.model.path, folder)
    (folder / "model.safetensors").unlink()
    trainer = make_trainer(embedded_config(f"actor_rollout_ref.model.path={folder}"), POOL, HYBRID)
    with pytest.raises(DataError, match="without_weights"):
        trainer.init_workers()
    assert trainer.workers.groups == []
    assert not torch.distributed.is_initialized()


def test_val_only_validates_and_trains_nothing(embedded_config):
    (row,) = train(embedded_config("trainer.val_only=true", "trainer.val_before_train=false"), POOL, HYBRID)
    assert row["step"] == 0
    assert any(name.startswith("val-core/") for name in row)


def test_a_policy_that_does_not_change_is_the_same_before_and_after(embedded_config):
    """Although all rows are validated after the step, and a part of them before."""
    keys = ["actor_rollout_ref.actor.optim.lr=0", "trainer.val_before_train=true", "trainer.val_before_train_samples=8"]
    keys += ["actor_rollout_ref.rollout.val_kwargs.n=2"]  # two equal greedy answers
    before, after = train(embedded_config(*keys, "trainer.total_training_steps=1", "trainer.test_freq=1"), POOL, HYBRID)
    assert before["val-aux/share_of_rows"] < 1
    found = {name: value for name, value in before.items() if name.startswith(("val-core/", "val-aux/lockstep"))}
    first = {name.removeprefix("val-first/"): value for name, value in after.items() if name.startswith("val-first/")}
    assert found
    assert first == found
    assert {name: after[name] for name in found} != found


def test_a_reward_of_the_judges_own_does_not_hide_in_validation(embedded_config, tmp_path):
    def judge(data_source, solution_str, ground_truth):
        return {"score": 0.5, "reward": 3.0}

    config = embedded_config("trainer.val_only=true", f"trainer.validation_data_dir={tmp_path}")
    judges = RewardManager(hf_tokenizer(str(config.actor_rollout_ref.model.path)), 0, compute_score=judge)
    (row,) = train(config, POOL, HYBRID, val_reward_fn=judges)
    assert {row[name] for name in row if name.endswith("/said_reward/mean@1")} == {3.0}
    assert {row[name] for name in row if name.endswith("/reward/mean@1")} == {0.5}
    written = json.loads((tmp_path / "0.jsonl").read_text().splitlines()[0])
    assert (written["score"], written["reward"], written["said_reward"]) == (0.5, 0.5, 3.0)


def test_resuming_from_a_named_checkpoint_and_refusing_a_folder_that_is_none(embedded_config, tmp_path):
    first = embedded_config("trainer.total_training_steps=1", "trainer.val_before_train=false", "trainer.save_freq=1")
    train(first, POOL, HYBRID)
    again = ["trainer.total_training_steps=2", "trainer.val_before_train=false", "trainer.resume_mode=resume_path"]
    elsewhere = f"trainer.default_local_dir={tmp_path / 'other'}"
    path = first.trainer.run_dir / "global_step_1"
    rows = train(embedded_config(*again, f"trainer.resume_from_path={path}", elsewhere), POOL, HYBRID)
    assert [row["step"] for row in rows] == [2]
    with pytest.raises(DataError, match="global_step_N"):
        train(embedded_config(*again, f"trainer.resume_from_path={tmp_path}", elsewhere), POOL, HYBRID)


def test_a_reward_of_the_wrong_shape_is_an_error_that_says_the_right_one(embedded_config):
    with pytest.raises(RewardError, match=r"shape \(16, \d+\).*got a tensor of shape \(3,\)"):
        train(embedded_config("trainer.val_before_train=false"), POOL, HYBRID, reward_fn=lambda batch: torch.zeros(3))


def test_a_failed_step_does_not_count(embedded_config):
    def fail(batch):
        raise RewardError("no")

    trainer = make_trainer(embedded_config("trainer.val_before_train=false"), POOL, HYBRID, reward_fn=fail)
    try:
        trainer.init_workers()
        with pytest.raises(RewardError):
            trainer.fit()
    finally:
        trainer.close()
    assert trainer.global_steps == 0


def test_roles_that_cannot_do_what_the_config_asks_are_an_error_before_anything_starts(embedded_config):
    with pytest.raises(ConfigError, match=r"Role\.RefPolicy"):
        make_trainer(embedded_config(), POOL, roles("ActorRollout", "Critic"))
    with pytest.raises(ConfigError, match="Rollout"):
        make_trainer(embedded_config(), POOL, roles("Actor", "Critic", "RefPolicy"))


def test_a_pool_of_a_role_that_is_not_needed_takes_no_resources(embedded_config):
    config = embedded_config(
        "trainer.total_training_steps=1",
        "trainer.val_before_train=false",
        "algorithm.adv_estimator=grpo",
        "algorithm.use_kl_in_reward=false",
    )
    mapping = {Role.ActorRollout: "global_pool", Role.Critic: "critic_pool"}
    assert len(train(config, POOL | {"critic_pool": [4096]}, mapping)) == 1


def test_a_pool_larger_than_the_machine_is_an_error_with_numbers(embedded_config):
    trainer = make_trainer(embedded_config(), {"global_pool": [4096]}, HYBRID)
    with pytest.raises(ResourceError, match="4096 CPUs"):
        trainer.init_workers()
