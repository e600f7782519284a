"""Values that go together: those of each algorithm, and those of the embedded task.

They are laid over the defaults of the dataclasses, which suit PPO on a language model; the user's file and arguments are laid over them.
"""

from typing import Any


def _against_group(*, kl_loss: bool = False, estimator: str = "grpo", **actor: Any) -> dict[str, Any]:
    """Eight samples per prompt and no critic; `actor` is what differs in `actor_rollout_ref.actor`."""
    return {
        "algorithm": {"adv_estimator": estimator, "use_kl_in_reward": False},
        "actor_rollout_ref": {"actor": {"use_kl_loss": kl_loss} | actor, "rollout": {"n": 8}},
    }


def _with_loss(mode: str, aggregation: str = "token-mean", **actor: Any) -> dict[str, Any]:
    return _against_group(policy_loss={"loss_mode": mode}, loss_agg_mode=aggregation, **actor)


def _with_kl_in_reward(estimator: str, **rollout: Any) -> dict[str, Any]:
    return {"algorithm": {"adv_estimator": estimator, "use_kl_in_reward": True}, "actor_rollout_ref": {"rollout": rollout}}


def _of_dr_grpo() -> dict[str, Any]:
    preset = _against_group(loss_agg_mode="seq-mean-token-sum-norm")
    preset["algorithm"]["norm_adv_by_std_in_grpo"] = False
    return preset


def _of_dapo() -> dict[str, Any]:
    preset = _against_group(clip_ratio_low=0.2, clip_ratio_high=0.28, loss_agg_mode="token-mean")
    preset["algorithm"]["filter_groups"] = {"enable": True}
    return preset | {"reward": {"overlong_buffer": {"enable": True}}}


ALGORITHMS: dict[str, dict[str, Any]] = {
    "ppo": {},
    "grpo": _against_group(kl_loss=True),
    "dr_grpo": _of_dr_grpo(),
    "grpo_passk": _against_group(estimator="grpo_passk"),
    "dapo": _of_dapo(),
    "gspo": _with_loss("gspo", "seq-mean-token-mean", clip_ratio_low=3e-4, clip_ratio_high=4e-4),
    "gmpo": _with_loss("geo_mean", "seq-mean-token-mean", clip_ratio_low=0.4, clip_ratio_high=0.4),
    "sapo": _with_loss("sapo", "seq-mean-token-mean"),
    "cispo": _with_loss("cispo", clip_ratio_low=1.0, clip_ratio_high=0.28),
    "dppo": _with_loss("dppo_tv", clip_ratio_c=20.0),
    "clip_cov": _with_loss("clip_cov"),
    "kl_cov": _with_loss("kl_cov"),
    "gpg": _against_group(estimator="gpg", policy_loss={"loss_mode": "gpg"}),
    "opo": _against_group(estimator="opo", policy_loss={"loss_mode": "gpg"}),
    "otb": _against_group(estimator="optimal_token_baseline", policy_loss={"loss_mode": "gpg"}),
    "gdpo": _against_group(estimator="gdpo"),
    "rloo": _with_kl_in_reward("rloo", n=8),
    "remax": _with_kl_in_reward("remax"),
    "reinforce_plus_plus": _with_kl_in_reward("reinforce_plus_plus"),
    "reinforce_plus_plus_baseline": _with_kl_in_reward("reinforce_plus_plus_baseline", n=8),
}
"""Command -> what makes `lockstep ppo` that algorithm; docs/algorithms/index.md has the table."""

EMBEDDED_PRESET: dict[str, Any] = {
    "data": {"train_batch_size": 64, "max_prompt_length": 8, "max_response_length": 8},
    "actor_rollout_ref": {
        "model": {"enable_gradient_checkpointing": False},
        "actor": {
            "ppo_mini_batch_size": 32,
            "entropy_coeff": 0.005,
            "optim": {"lr": 5e-4, "lr_scheduler_type": "cosine", "min_lr_ratio": 0.1},
        },
        "rollout": {"n": 8},
    },
    "critic": {"model": {"enable_gradient_checkpointing": False}, "optim": {"lr": 1e-3}},
    "algorithm": {"use_kl_in_reward": True},
    "trainer": {"total_training_steps": 100, "critic_warmup": 5, "test_freq": 20},
}
"""What runs without data and a model: a model of a few hundred thousand parameters, which writes words backwards."""

EMBEDDED_CHANGES: dict[str, dict[str, Any]] = {
    # Its responses end at the limit, and a batch of prompts is a large part of all words.
    "dapo": {
        "algorithm": {"filter_groups": {"max_num_gen_batches": 4}},
        "reward": {"overlong_buffer": {"penalty_factor": 0.5}},
    },
    # The ranges of the paper are for long responses; these have a few tokens.
    "gspo": {"actor_rollout_ref": {"actor": {"clip_ratio_low": 0.03, "clip_ratio_high": 0.04}}},
}
"""What of an algorithm's preset does not suit that task."""
