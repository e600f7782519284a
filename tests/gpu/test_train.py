"""Training on a GPU: the same numbers as on the CPU in float32, and the usual precision (bfloat16 over float32 weights) learns."""

import pytest
import torch
from helpers.letters import num_letters
from helpers.mixtures import MIXTURES
from helpers.run import roles, train
from helpers.small_pages import SMALL
from helpers.tiny import save_tiny_model

from lockstep.rewards.manager import RewardManager
from lockstep.utils.tokenizer import hf_tokenizer

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


GRPO = (
    "algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=4", "trainer.val_before_train=false", "trainer.device=cuda",
    "actor_rollout_ref.actor.optim.lr=1e-2", "trainer.save_freq=2", "actor_rollout_ref.rollout.exactness_bound=0",
)  # fmt: skip
"""In bfloat16, with the trainer's log-probs beside the sampler's."""
GAP, SHARED = "training/rollout_probs_diff_mean", roles("ActorRolloutRef", pool="p")


def test_adapters_learn_as_they_sample_resume_and_start_from_pefts_folder(embedded_config_in, tmp_path):
    """The sampler is about as far from the trainer as where all weights learn, though the adapters have learned something."""
    pytest.importorskip("peft")

    def grpo(name, steps, *more):
        return train(embedded_config_in(tmp_path / name, *GRPO, f"trainer.total_training_steps={steps}", *more), {"p": [1]}, SHARED)

    lora = "actor_rollout_ref.model.lora_rank=8"
    whole, adapted = grpo("whole", 4), grpo("adapted", 4, lora)
    print("sampler against trainer in bfloat16:", [row[GAP] for row in whole], [row[GAP] for row in adapted])
    # The two are not one policy after their first update; where every token is sure, all that is left are last bits of float32.
    bound = max(1e-5, *(3 * row[GAP] for row in whole))
    assert all(row[GAP] <= bound for row in adapted)
    assert adapted[-1]["actor/reward_kl_penalty"] > 1e-3, "the adapters have learned nothing, so their gap says nothing"
    rows = {row["step"]: row for row in grpo("resumed", 2, lora) + grpo("resumed", 4, lora)}
    for row in adapted:
        assert rows[row["step"]]["critic/score/mean"] == pytest.approx(row["critic/score/mean"], rel=0.1), row["step"]
    folder = next((tmp_path / "adapted").glob("global_step_4/**/adapter"))
    (given,) = grpo("given", 1, f"actor_rollout_ref.model.lora_adapter_path={folder}")
    assert given[GAP] <= bound
    assert given["actor/reward_kl_penalty"] > 1e-3


def test_a_mixture_learns_through_the_samplers_experts(embedded_config_in, tmp_path):
    path = save_tiny_model(tmp_path / "model", "qwen3_moe", **MIXTURES["qwen3_moe"] | {"num_experts": 16, "num_experts_per_tok": 4})
    reward = RewardManager(hf_tokenizer(path), num_examine=0, compute_score=num_letters, num_workers=1)
    keys = (*GRPO, f"actor_rollout_ref.model.path={path}", "trainer.total_training_steps=3")

    def grpo(name, *more):
        return train(embedded_config_in(tmp_path / name, *keys, *more), {"p": [1]}, SHARED, reward_fn=reward)

    own, kept = grpo("own"), grpo("kept", "actor_rollout_ref.rollout.router_replay=true")
    print("sampler against trainer in bfloat16:", [row[GAP] for row in own], [row[GAP] for row in kept])
    assert own[0]["critic/score/mean"] == kept[0]["critic/score/mean"]
    assert "moe/rerouted" not in own[0]
    assert all(0.0 <= row["moe/rerouted"] < 0.1 for row in kept)
    assert all(row["actor/grad_norm"] > 0 for row in kept)
    assert kept[0][GAP] <= own[0][GAP]


@pytest.mark.parametrize("kept", SMALL)
def test_a_run_over_keys_in_fewer_bits_learns_and_its_old_log_probs_are_the_trainers(embedded_config_in, tmp_path, kept):
    """The sampler is further away than over bfloat16 keys, so the trainer's pass stays; reward rises as it does there."""
    heads_of_64 = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
    path = save_tiny_model(tmp_path / "model", "llama", **heads_of_64)
    reward = RewardManager(hf_tokenizer(path), num_examine=0, compute_score=num_letters, num_workers=1)

    def grpo(name, *more):
        keys = (
            f"actor_rollout_ref.model.path={path}", "algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=8", "trainer.device=cuda",
            "trainer.val_before_train=false", "actor_rollout_ref.actor.optim.lr=2e-3", "trainer.total_training_steps=30",
            "algorithm.use_kl_in_reward=false", "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        )  # fmt: skip
        return train(embedded_config_in(tmp_path / name, *keys, *more), {"p": [1]}, SHARED, reward_fn=reward)

    def score(rows):
        return sum(row["critic/score/mean"] for row in rows) / len(rows)

    plain, small = grpo("plain"), grpo("small", f"actor_rollout_ref.rollout.kv_cache_dtype={kept}")
    print("scores:", [[round(score(rows[at : at + 5]), 3) for at in range(0, 30, 5)] for rows in (plain, small)])
    print("sampler against trainer:", [[round(row[GAP], 5) for row in rows[::10] if GAP in row] for rows in (plain, small)])
    assert small[0][GAP] > 2 * plain[0][GAP], "the pages do not seem to have fewer bits"
    assert all(row[GAP] < 0.05 and "timing_s/old_log_prob" in row for row in small)
    assert score(small[-5:]) - score(small[:5]) > 0.5 * (score(plain[-5:]) - score(plain[:5])) > 0.05
