"""The megatron engine on one GPU, without helpers/cuda_to_cpu.py: it trains as fsdp2 does there."""

import pytest
import torch
from helpers.run import roles, train

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
pytest.importorskip("megatron.core")

ROLES = roles("ActorRolloutRef", "Critic")
POOL = {"global_pool": [1]}


def strategy(name):
    return [f"actor_rollout_ref.actor.strategy={name}", f"critic.strategy={name}", f"trainer.experiment_name={name}"]


def test_float32_trains_like_fsdp2(embedded_config):
    section = {"fsdp2": "fsdp_config", "megatron": "megatron"}
    runs = {}
    for name in section:
        dtypes = [f"{role}.{section[name]}.dtype=float32" for role in ("actor_rollout_ref.actor", "critic")]
        more = ["trainer.total_training_steps=3", "trainer.val_before_train=false", "trainer.device=cuda"]
        runs[name] = train(embedded_config(*strategy(name), *dtypes, *more), POOL, ROLES)
    for metric in ("critic/score/mean", "actor/grad_norm", "critic/vf_loss", "response_length/mean"):
        mine, want = ([row[metric] for row in runs[name]] for name in ("megatron", "fsdp2"))
        assert mine == pytest.approx(want, rel=2e-3), metric


def test_bfloat16_runs_saves_and_says_how_far_the_sampler_is(embedded_config):
    config = embedded_config(
        *strategy("megatron"), "trainer.total_training_steps=4", "trainer.test_freq=4", "trainer.save_freq=4", "trainer.device=cuda"
    )
    metrics = train(config, POOL, ROLES)
    # Both sides round to bfloat16, at other places (the sampler's residual stream is float32): a few units in its last place of log-probs
    # of this size.
    drift = metrics[1]["training/rollout_log_probs_diff_max"]
    print(f"sampler against trainer in bfloat16, megatron: {drift:.2g}")
    assert drift < 0.15
    assert all(row["actor/grad_norm"] > 0 for row in metrics[1:])
    assert (config.trainer.run_dir / "global_step_4" / "actor" / "optimizer" / "exp_avg.safetensors").is_file()
