"""The plan reaches the workers: on a CPU with a made-up memory size, where moving is real and results can be compared to the bit."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.run import STEPS, make_trainer, read_metrics, roles
from helpers.tiny import save_tiny_model

from lockstep.config import PPOConfig
from lockstep.config.actor_rollout_ref import POLICY_ROLES
from lockstep.errors import ResourceError
from lockstep.planner import choices as choose
from lockstep.planner.memory import plan_memory
from lockstep.planner.needs import policy_needs, training_needs
from lockstep.single_controller.base import Dispatch, Worker, register
from lockstep.trainer.ppo.ray_trainer import RayPPOTrainer, Role
from lockstep.trainer.ppo.roles import load_of
from lockstep.workers import engine_workers, model_worker, training_worker

POOL = {"global_pool": [1]}
NAMES = ("ActorRollout", "Critic", "RefPolicy")


@pytest.fixture
def device_with(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """`device_with(bytes)`: every worker sees a device with so much free memory."""
    return lambda free: monkeypatch.setattr(model_worker, "free_device_memory", lambda device: free)


def placed(trainer: RayPPOTrainer) -> dict[str, tuple[bool, bool]]:
    """Engine -> whether its weights and its moments rest on the host."""
    workers = {name: worker for group in trainer.workers.groups for name, worker in group._host.workers.items()}
    engines = {
        "actor": workers["actor_rollout"].actor.engine,
        "critic": workers["critic"].engine,
        "ref": workers["ref"].ref.engine,
        **({"reward_model": workers["rm"].engine} if "rm" in workers else {}),
    }
    return {name: (engine._offload is not None, engine._offloads_state) for name, engine in engines.items()}


def run(config: PPOConfig) -> tuple[list[dict[str, Any]], dict[str, tuple[bool, bool]], dict[str, torch.Tensor]]:
    """Metrics of every step, what rests, and the weights at the end."""
    trainer = make_trainer(config, POOL, roles(*NAMES))
    try:
        trainer.init_workers()
        trainer.fit()
        workers = trainer.workers.groups[0]._host.workers
        engines = {"actor": workers["actor_rollout"].actor.engine, "critic": workers["critic"].engine}
        weights = {f"{role}.{name}": tensor.clone() for role, engine in engines.items() for name, tensor in engine.export_weights()}
        return read_metrics(config), placed(trainer), weights
    finally:
        trainer.close()


def test_a_plan_that_offloads_trains_to_the_same_bits(
    embedded_config_in: Callable[..., PPOConfig],
    tmp_path: Path,
    device_with: Callable[[int], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The actor's weights, which the decoder shares in float32, stay; what else may rest does, and everything is recomputed."""
    expected, rests, wanted = run(embedded_config_in(tmp_path / "plain", *STEPS))
    assert set(rests.values()) == {(False, False)}
    assert "in host memory" not in capsys.readouterr().out

    config = embedded_config_in(tmp_path / "planned", *STEPS)
    device_with(smallest_that_fits(config))
    metrics, rests, weights = run(config)
    assert rests == {"actor": (False, True), "critic": (True, True), "ref": (True, False)}
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "in host memory" in line]
    assert line.startswith("pool global_pool: in host memory while others work: actor (moments ")
    assert weights.keys() == wanted.keys()
    assert all(torch.equal(weights[name], wanted[name]) for name in wanted)
    assert [untimed(row) for row in metrics] == [untimed(row) for row in expected]


def untimed(metrics: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in metrics.items() if not name.startswith(("time", "timing", "perf"))}


def smallest_that_fits(config: PPOConfig) -> int:
    """The least memory, to the byte, with which the models of NAMES can be planned."""
    load = load_of(config, Role.Critic, ranks=1)
    options = {"load": load, "world_size": 1, "element": 4}
    models, rollout = policy_needs(config.actor_rollout_ref, POLICY_ROLES["actor_rollout"], **options)
    models += policy_needs(config.actor_rollout_ref, POLICY_ROLES["ref"], **options)[0]
    critic = dataclasses.replace(config.critic, model=config.actor_rollout_ref.model)
    models.append(training_needs(critic, **options))
    low, high = 0, 1 << 30
    while high - low > 1:
        middle = (low + high) // 2
        try:
            plan_memory(models, rollout, middle)
            high = middle
        except ResourceError:
            low = middle
    return high


def test_enough_memory_offloads_nothing_and_says_nothing(
    embedded_config: Callable[..., PPOConfig],
    device_with: Callable[[int], None],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    """What the user asks for is done all the same."""
    judge = save_tiny_model(tmp_path / "rm", score_head=True)
    config = embedded_config(
        *STEPS, "critic.fsdp_config.optimizer_offload=true", "reward_model.enable=true", f"reward_model.model.path={judge}"
    )
    device_with(1 << 40)
    trainer = make_trainer(config, POOL, roles(*NAMES, "RewardModel"))
    try:
        trainer.init_workers()
        none = (False, False)
        assert placed(trainer) == {"actor": none, "critic": (False, True), "ref": none, "reward_model": none}
        workers = trainer.workers.groups[0]._host.workers
        assert workers["actor_rollout"].config.model.enable_gradient_checkpointing is False  # there is room for all activations
        section, rows = workers["actor_rollout"].config, config.data.train_batch_size * config.actor_rollout_ref.rollout.n
        assert (section.rollout.max_num_seqs, section.rollout.max_num_batched_tokens) == (rows, 8192)
        assert section.rollout.gpu_memory_utilization == 0.9
        assert (section.actor.ppo_max_token_len_per_gpu, workers["critic"].budget.max_tokens) == (8192, 8192)
        assert workers["rm"].budget.max_tokens == 32768
    finally:
        trainer.close()
    out = capsys.readouterr().out
    assert "in host memory" not in out
    assert (
        f"chosen for auto: actor_rollout_ref.actor.ppo_max_token_len_per_gpu=8192, actor_rollout_ref.rollout.max_num_seqs={rows}"
        in out
    )


def test_a_run_that_goes_on_where_less_memory_is_free_ends_with_the_same_bits(
    embedded_config_in: Callable[..., PPOConfig],
    tmp_path: Path,
    device_with: Callable[[int], None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Its micro-batches are those of the beginning, which a run that begins there does not choose."""
    monkeypatch.setattr(choose, "CANDIDATES", (64, 128, 256))

    def played(folder: str, *more: str) -> tuple[Any, Any, str]:
        metrics, _, weights = run(embedded_config_in(tmp_path / folder, *STEPS, *more))
        out = capsys.readouterr().out
        return [untimed(row) for row in metrics], weights, next(line for line in out.splitlines() if "chosen for auto" in line)

    device_with(1 << 40)
    expected, wanted, first = played("whole")
    played("stopped", "trainer.total_training_steps=1", "trainer.save_freq=1")
    device_with(smallest_that_fits(embedded_config_in(tmp_path / "stopped", *STEPS)))
    metrics, weights, again = played("stopped")
    assert again.split(", actor_rollout_ref.rollout.gpu")[0] == first.split(", actor_rollout_ref.rollout.gpu")[0]
    assert "ppo_max_token_len_per_gpu=256" in again
    assert all(torch.equal(weights[name], wanted[name]) for name in wanted)
    assert metrics == expected
    assert "ppo_max_token_len_per_gpu=256" not in played("other")[2]


def test_on_a_cpu_auto_is_the_plain_numbers(embedded_config: Callable[..., PPOConfig], capsys: pytest.CaptureFixture[str]) -> None:
    trainer = make_trainer(embedded_config(*STEPS, "actor_rollout_ref.rollout.max_num_batched_tokens=99"), POOL, roles(*NAMES))
    try:
        trainer.init_workers()
        workers = trainer.workers.groups[0]._host.workers
        rollout, actor = workers["actor_rollout"].config.rollout, workers["actor_rollout"].config.actor
        assert (rollout.max_num_seqs, rollout.max_num_batched_tokens, rollout.gpu_memory_utilization) == (256, 99, 0.5)
        assert (actor.ppo_max_token_len_per_gpu, workers["critic"].config.ppo_max_token_len_per_gpu) == (2048, 2048)
    finally:
        trainer.close()
    assert "max_num_batched_tokens" not in capsys.readouterr().out


def test_models_that_cannot_fit_are_refused_before_any_is_loaded(
    embedded_config: Callable[..., PPOConfig], device_with: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (engine_workers, training_worker):
        monkeypatch.setattr(module, "make_engine", lambda *args, **options: pytest.fail("a model was loaded"))
    device_with(1 << 16)
    trainer = make_trainer(embedded_config(*STEPS), POOL, roles(*NAMES))
    with pytest.raises(
        ResourceError, match=r"pool global_pool: the models do not fit .* GB \(.*actor weights.*; raise trainer\.n_gpus"
    ):
        trainer.init_workers()


def test_what_cannot_rest_in_host_memory_is_refused_too(
    embedded_config: Callable[..., PPOConfig], device_with: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = embedded_config(*STEPS)
    device_with(smallest_that_fits(config))
    monkeypatch.setattr(model_worker, "available_ram", lambda: 1 << 16)
    with pytest.raises(
        ResourceError, match=r"rest in the host memory of .*, 1 times .*6\.1e-05 GB are free; raise trainer\.n_gpus"
    ):
        make_trainer(config, POOL, roles(*NAMES)).init_workers()


def test_pools_in_one_process_are_one_device(embedded_config: Callable[..., PPOConfig], device_with: Callable[[int], None]) -> None:
    device_with(1 << 16)
    pools = {"global_pool": [1], "critic_pool": [1]}
    mapping = roles(*NAMES) | {Role.Critic: "critic_pool"}
    trainer = make_trainer(embedded_config(*STEPS), pools, mapping)
    with pytest.raises(ResourceError, match="pool global_pool, critic_pool: "):
        trainer.init_workers()


class Judge(Worker):
    """A worker of the user's own, which knows nothing of plans."""

    def __init__(self, config: Any, role: str, *, seed: int) -> None:
        self.loaded = False

    @register(Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        self.loaded = True


def test_a_worker_that_says_nothing_of_its_memory_is_started_as_ever(
    embedded_config: Callable[..., PPOConfig], device_with: Callable[[int], None], tmp_path: Path
) -> None:
    device_with(1 << 40)
    judge = save_tiny_model(tmp_path / "rm", score_head=True)
    config = embedded_config(*STEPS, "reward_model.enable=true", f"reward_model.model.path={judge}")
    trainer = make_trainer(config, POOL, roles(*NAMES, "RewardModel"))
    trainer.role_worker_mapping[Role.RewardModel] = Judge
    try:
        trainer.init_workers()
        assert trainer.workers.groups[0]._host.workers["rm"].loaded
    finally:
        trainer.close()


def test_where_not_all_rows_fit_fewer_are_generated_at_once_and_a_run_goes_on_so(
    embedded_config_in: Callable[..., PPOConfig],
    tmp_path: Path,
    device_with: Callable[[int], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A number of the user's own is refused there, with the key that leaves it to the plan."""
    keys = [
        *STEPS, "data.train_batch_size=32", "actor_rollout_ref.rollout.n=8", "data.max_response_length=40",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=64", "critic.ppo_max_token_len_per_gpu=64", "trainer.save_freq=1",
    ]  # fmt: skip
    device_with(1_750_000)

    def chosen(*more: str) -> str:
        run(embedded_config_in(tmp_path, *keys, *more))
        return next(line for line in capsys.readouterr().out.splitlines() if "chosen for auto" in line)

    first = chosen("trainer.total_training_steps=1")
    assert 1 <= int(first.split("max_num_seqs=")[1].split(",")[0]) < 128
    assert chosen() == first
    with pytest.raises(ResourceError, match=r"key-value cache .*; set actor_rollout_ref\.rollout\.max_num_seqs=auto, or below 64"):
        run(embedded_config_in(tmp_path / "own", *keys, "actor_rollout_ref.rollout.max_num_seqs=64"))
