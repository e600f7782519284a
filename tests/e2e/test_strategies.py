"""Every training engine in a whole PPO run: two ranks under Ray, in its own layout, begin as fsdp2 in one process does, and learn.
So does distillation on those that compute on a CPU."""

import json
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
from helpers import cuda_to_cpu
from helpers.run import assert_same_training, roles, train
from helpers.tiny import perturbed

from lockstep.single_controller.ray import RayWorkerGroup
from lockstep.trainer import recipes
from lockstep.trainer.ppo.ray_trainer import Role
from lockstep.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker


class Policy(ActorRolloutRefWorker):
    """megatron-core is written for CUDA."""

    def init_model(self) -> None:
        if self.config.actor.strategy == "megatron":
            cuda_to_cpu.install()
        super().init_model()


class Critic(TrainingWorker):
    """The same."""

    def init_model(self) -> None:
        if self.config.strategy == "megatron":
            cuda_to_cpu.install()
        super().init_model()


LAYOUTS = {
    "fsdp2, layers divided": ("fsdp2", "fsdp_config.tensor_parallel_size=2"),
    "fsdp, tokens divided": ("fsdp", "fsdp_config.ulysses_sequence_parallel_size=2"),
    "megatron, stages": ("megatron", "megatron.pipeline_model_parallel_size=2"),
    "torchtitan, layers divided": ("torchtitan", "torchtitan.tensor_parallel_size=2"),
    "veomni, tokens divided": ("veomni", "veomni.ulysses_parallel_size=2"),
}


RUN = (
    "trainer.total_training_steps=20", "trainer.val_before_train=false", "data.train_batch_size=32", "actor_rollout_ref.rollout.n=4",
    "actor_rollout_ref.actor.ppo_mini_batch_size=32", "actor_rollout_ref.actor.optim.lr=1e-3",
    "algorithm.use_kl_in_reward=false", "actor_rollout_ref.actor.use_kl_loss=true",
)  # fmt: skip
"""One update a batch, which computes its old log-probs itself; the reference's are a pass of the same engine."""


@pytest.fixture(scope="module")
def expected(embedded_config_in, tmp_path_factory):
    """fsdp2 on one rank in this process."""
    config = embedded_config_in(tmp_path_factory.mktemp("expected"), *RUN, "trainer.total_training_steps=3")
    return train(config, {"global_pool": [1]}, roles("ActorRolloutRef", "Critic"))


def assert_begins_alike_and_learns(config: Any, expected: list[dict[str, Any]]) -> None:
    """The first responses are the same tokens; sums are rounded in another order, and updates carry that on: 1e-3 of each metric.

    The share of words written backwards goes from 0.4 to 0.6 in these 20 steps with fsdp2.
    """
    metrics = train(
        config,
        {"global_pool": [2]},
        roles("ActorRolloutRef", "Critic"),
        RayWorkerGroup,
        role_worker_mapping={Role.ActorRolloutRef: Policy, Role.Critic: Critic},
    )
    assert_same_training(metrics[:3], expected, rel=1e-3)
    scores = [row["critic/score/mean"] for row in metrics]
    assert mean(scores[-5:]) > mean(scores[:2]) + 0.1, scores


@pytest.fixture(scope="session")
def warm_ray():
    """Workers that import everything themselves: what stands for CUDA here must be there before torch's compiler is."""
    return {}


@pytest.mark.ray
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_whole_run_begins_as_fsdp2_in_one_process_and_learns(ray_cluster, expected, embedded_config, layout):
    strategy, key = LAYOUTS[layout]
    chosen = [f"{place}.{what}" for place in ("actor_rollout_ref.actor", "critic") for what in (f"strategy={strategy}", key)]
    assert_begins_alike_and_learns(embedded_config(*RUN, *chosen), expected)


@pytest.mark.ray
def test_an_actor_on_megatron_with_a_critic_on_fsdp2(ray_cluster, expected, embedded_config):
    actor = "actor_rollout_ref.actor"
    mixed = (f"{actor}.strategy=megatron", f"{actor}.megatron.tensor_model_parallel_size=2", "critic.strategy=fsdp2")
    assert_begins_alike_and_learns(embedded_config(*RUN, *mixed), expected)


def distilled(folder: Path, arguments: dict[str, Any], **changes: Any) -> list[dict[str, float]]:
    options = arguments | changes | {"trainer.default_local_dir": folder}
    assert recipes.DISTILL.main([f"{key}={value}" for key, value in options.items()]) == 0
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("strategy", ["torchtitan", "veomni"])
def test_distillation_goes_as_with_fsdp2(embedded_task: Any, tmp_path: Path, strategy: str) -> None:
    """Both models in the engine, on given answers and on the student's own, which it samples from these weights."""
    rows = [{"prompt": word, "completion": word[::-1]} for word in ("abc", "face", "bed", "dig", "chad", "jig")]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = {
        "model.path": embedded_task.model, "teacher.path": perturbed(embedded_task.model, tmp_path / "teacher"),
        "data.train_files": tmp_path / "train.jsonl", "data.max_length": 32, "data.train_batch_size": 6, "optim.lr": 1e-3,
        "distill.max_response_length": 12, "trainer.total_training_steps": 3,
    }  # fmt: skip
    expected = distilled(tmp_path / "fsdp2", arguments)
    for found, want in zip(distilled(tmp_path / strategy, arguments, **{"engine.strategy": strategy}), expected, strict=True):
        for name in ("train/kl", "train/agreement", "train/grad_norm", "train/on_policy_length"):
            assert found[name] == pytest.approx(want[name], rel=1e-3), name
    assert expected[-1]["train/kl"] < expected[0]["train/kl"]
