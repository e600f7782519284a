"""PPO on a GPU that is made small: the plan lets actor, critic and reference take turns in it, and the peaks are what it counted."""

from pathlib import Path

import pytest
import torch
from helpers.run import make_trainer, read_metrics, roles
from helpers.tiny import save_tiny_model

from lockstep.planner.memory import plan_memory, stage_bytes
from lockstep.planner.needs import Load

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

NAMES = ("ActorRollout", "Critic", "RefPolicy")
SHAPE = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 6,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
}
"""About 0.4 billion parameters: large beside what the plan does not see."""

LIMIT_GB = 8


def test_models_that_do_not_fit_together_take_turns(embedded_config, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = save_tiny_model(tmp_path / "model", **SHAPE)
    config = embedded_config(
        f"actor_rollout_ref.model.path={path}", "trainer.total_training_steps=3", "trainer.val_before_train=false",
        "actor_rollout_ref.rollout.exactness_bound=0", "trainer.device=cuda",
        "critic.ppo_epochs=2",  # with one update of a batch the critic has no pass of its own for values
    )  # fmt: skip
    total = torch.cuda.get_device_properties(0).total_memory
    gb = 2**30
    torch.cuda.empty_cache()
    # All three on the device take 12.4 GB in an update; with everything idle at rest it takes 6.1.
    torch.cuda.set_per_process_memory_fraction(LIMIT_GB * gb / total)
    trainer = make_trainer(config, {"global_pool": [1]}, roles(*NAMES))
    try:
        trainer.init_workers()
        trainer.fit()
        workers = trainer.workers.groups[0]._host.workers
        load = Load(28, 16, 16)
        needs = [workers[name].memory_needs(load) for name in ("actor_rollout", "critic", "ref")]
    finally:
        trainer.close()
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert "in host memory while others work: " in capsys.readouterr().out
    models, rollout = [model for need in needs for model in need.models], needs[0].rollout
    # The workers have what was decided in the place of auto, so a plan is forced to be that one.
    counted = stage_bytes(models, rollout, plan_memory(models, rollout, total))
    last = read_metrics(config)[-1]
    for stage in ("old_log_prob", "ref", "values", "update_critic", "update_actor"):
        measured = last[f"perf/max_memory_allocated_gb/{stage}"] * gb
        print(f"{stage}: {measured / gb:.2f} GB measured, {counted[stage] / gb:.2f} counted")
        # Beside what is counted: workspaces of matrix products, squares for the norm of a gradient, one layer's gradients twice.
        assert measured <= counted[stage] + gb / 2
    assert last["perf/max_memory_reserved_gb"] <= LIMIT_GB
