"""A first run on a CPU: its sizes, where the user names a model and not how large the run is.

A step of the dataclasses' defaults is up to hundreds of rows of 512 or 2,048 tokens, which suits a GPU; two cores would work on it for most
of an hour, and on one pass over the data for weeks.
"""

from collections.abc import Mapping
from typing import Any

from lockstep.config.presets import ALGORITHMS

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

ORIGIN = "a first run on a CPU"
"""What its values are called in `lockstep explain`."""

_RESPONSES = 32
_TOKENS = 128
_STEPS = 6
_ROWS = 8
_ROW_TOKENS = 512
_UPDATES = 10


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


def in_words(algorithm: str) -> str:
    """Return what is smaller than usual in a run of PPO, why, and how it is changed."""
    values = first_run_on_cpu(algorithm)
    return (
        f"{ORIGIN}: there is no GPU and no key says how large the run is, so it is small:\n  {_keys(values)}\n"
        f"That is {_RESPONSES} responses a step. Name one of these keys and the others have their usual values; name all of them, with "
        "more steps, and this run goes on."
    )


def stage_in_words(values: Mapping[str, Any]) -> str:
    """Return the line that another recipe prints of its values."""
    return f"{ORIGIN}, so it is small: {_keys(values)} (set a size, such as data.train_batch_size, and all have their usual values)"


def _keys(values: Mapping[str, Any]) -> str:
    """The values as arguments."""
    return " ".join(f"{section}.{name}={str(value).lower()}" for section, inner in values.items() for name, value in inner.items())
