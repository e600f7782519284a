"""Training on a GPU: the same numbers as on the CPU in float32, and the usual precision (bfloat16 over float32 weights) learns."""

import pytest
import torch
from helpers.run import roles, train

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

ROLES = roles("ActorRollout", "Critic", "RefPolicy")
POOL = {"global_pool": [1]}


@pytest.mark.parametrize("strategy", ["fsdp", "fsdp2"])
def test_float32_on_the_gpu_trains_like_the_cpu(strategy, embedded_config, tmp_path):
    more = [
        "trainer.total_training_steps=3", "trainer.val_before_train=false",
        f"actor_rollout_ref.actor.strategy={strategy}", f"critic.strategy={strategy}",
        "actor_rollout_ref.actor.fsdp_config.dtype=float32", "critic.fsdp_config.dtype=float32",
    ]  # fmt: skip
    on_cpu = train(embedded_config(*more, f"trainer.default_local_dir={tmp_path / 'cpu'}"), POOL, ROLES)
    on_gpu = train(embedded_config(*more, f"trainer.default_local_dir={tmp_path / 'gpu'}", "trainer.device=cuda"), POOL, ROLES)
    for name in ("critic/score/mean", "actor/grad_norm", "critic/vf_loss", "response_length/mean"):
        assert [row[name] for row in on_gpu] == pytest.approx([row[name] for row in on_cpu], rel=2e-3), name
    assert on_gpu[-1]["perf/max_memory_allocated_gb"] > 0


@pytest.mark.parametrize("strategy", ["fsdp", "fsdp2"])
@pytest.mark.parametrize("rollout", ["native", "hf"])
def test_bfloat16_over_float32_weights_runs_and_says_how_far_the_sampler_is(strategy, rollout, embedded_config):
    config = embedded_config(
        "trainer.total_training_steps=4", "trainer.test_freq=4", "trainer.save_freq=4", "trainer.device=cuda",
        f"actor_rollout_ref.actor.strategy={strategy}", f"critic.strategy={strategy}",
        f"actor_rollout_ref.rollout.name={rollout}",
    )  # fmt: skip
    metrics = train(config, POOL, ROLES)
    # Both sides round to bfloat16, in other orders: a few units in its last place of log-probs of this size.
    drift = metrics[1]["training/rollout_log_probs_diff_max"]
    print(f"sampler against trainer in bfloat16, {strategy}, {rollout}: {drift:.2g}")
    assert drift < 0.1
    assert all(row["actor/grad_norm"] > 0 for row in metrics[1:])
    assert (config.trainer.run_dir / "global_step_4" / "actor" / "model.safetensors").is_file()
