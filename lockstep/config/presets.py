"""Values that go together: of each algorithm, of the embedded task, and of a first run on a CPU.

They are laid over the defaults of the dataclasses, which suit PPO on a language model; the user's file and arguments are laid over them.

In a first run the user names a model, and not how large the run is. A step of the defaults is up to hundreds of rows of 512 or
2,048 tokens, which suits a GPU; two cores would work on it for most of an hour, and on one pass over the data for weeks.
"""

from collections.abc import Mapping
from typing import Any

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
SIZES = (
    "data.train_batch_size", "data.max_response_length", "data.train_max_samples", "actor_rollout_ref.rollout.n",
    "actor_rollout_ref.actor.ppo_mini_batch_size", "critic.ppo_mini_batch_size", "trainer.total_training_steps", "trainer.total_epochs",
    "trainer.n_gpus_per_node", "trainer.nnodes", "agent.environment", "agent.tools",
)  # fmt: skip
"""Keys that say how large a run of PPO is. If one of them is set, the others have the dataclasses' defaults, on every device."""
STAGE_SIZES = (
    "data.train_batch_size", "data.max_length", "data.train_max_samples", "data.val_max_samples", "trainer.total_training_steps",
    "trainer.total_epochs", "trainer.n_gpus_per_node", "trainer.nnodes", "sampled.max_samples", "sampled.max_response_length",
    "distill.max_response_length",
)  # fmt: skip
"""The same of the recipes that learn from files."""
FIRST_RUN = "a first run on a CPU"
"""What its values are called in `lockstep explain`."""
_RESPONSES = 32
_TOKENS = 128
_STEPS = 6
_ROWS = 8
_ROW_TOKENS = 512
_UPDATES = 10


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


def is_first_run(named: set[str], command: str = "lockstep ppo") -> bool:
    """Return whether a user who set the keys `named` has a model of their own, and says nothing about how large the run is. On the embedded
    task's words too: its presets are for its own model."""
    if command == "lockstep ppo":
        return "actor_rollout_ref.model.path" in named and not named & set(SIZES)
    return "model.path" in named and not named & set(STAGE_SIZES)


def first_run_on_cpu(algorithm: str) -> dict[str, Any]:
    """Return PPO's values: a few steps of about a minute each for a model of a hundred million parameters on two cores."""
    group = ALGORITHMS[algorithm].get("actor_rollout_ref", {}).get("rollout", {}).get("n", 1)
    return {
        "data": {"train_batch_size": _RESPONSES // group, "max_response_length": _TOKENS},
        # Each step is saved: it took a minute or more, and whoever tries things out interrupts them.
        "trainer": {"total_training_steps": _STEPS, "save_freq": 1, "max_ckpt_to_keep": 2},
    }


def first_stage_on_cpu(command: str, named: set[str]) -> dict[str, Any]:
    """Return the values of another recipe, for a user who set the keys `named`: a few minutes for such a model."""
    data = {"train_batch_size": _ROWS, "max_length": _ROW_TOKENS, "train_max_samples": 1000, "val_max_samples": 4 * _ROWS}
    if not named & {"data.truncation", "data.filter_overlong_rows"}:
        data["filter_overlong_rows"] = True
    values: dict[str, Any] = {"data": data, "trainer": {"total_training_steps": _UPDATES}}
    if "sampled.files" in named:
        values["sampled"] = {"max_samples": _ROWS, "max_response_length": _TOKENS}
    if command == "lockstep distill":
        values["distill"] = {"max_response_length": _TOKENS}
    return values


def first_run_in_words(algorithm: str) -> str:
    """Return what is smaller than usual in a run of PPO, why, and how it is changed."""
    values = first_run_on_cpu(algorithm)
    return (
        f"{FIRST_RUN}: there is no GPU and no key says how large the run is, so it is small:\n  {_keys(values)}\n"
        f"That is {_RESPONSES} responses a step. Name one of these keys and the others have their usual values; name all of them, with "
        "more steps, and this run goes on."
    )


def first_stage_in_words(values: Mapping[str, Any]) -> str:
    """Return the line that another recipe prints of its values."""
    return (
        f"{FIRST_RUN}, so it is small: {_keys(values)} (set a size, such as data.train_batch_size, and all have their usual values)"
    )


def _keys(values: Mapping[str, Any]) -> str:
    """The values as arguments."""
    return " ".join(f"{section}.{name}={str(value).lower()}" for section, inner in values.items() for name, value in inner.items())
