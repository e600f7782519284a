"""A first run on a CPU: what a run has there that names a model of its own, and not how large it is.

A step of the dataclasses' defaults is up to hundreds of responses of 512 tokens, which suits a GPU; two cores would work on it for most of
an hour, and on one pass over the data for weeks.
"""

from typing import Any

from lockstep.config.presets import ALGORITHMS

SIZES = (
    "data.train_batch_size", "data.max_response_length", "data.train_max_samples", "actor_rollout_ref.rollout.n",
    "actor_rollout_ref.actor.ppo_mini_batch_size", "critic.ppo_mini_batch_size", "trainer.total_training_steps", "trainer.total_epochs",
    "trainer.n_gpus_per_node", "trainer.nnodes", "agent.environment", "agent.tools",
)  # fmt: skip
"""Keys that say how large a run is. Whoever names one of them has the dataclasses' defaults for the others, on every device."""

ORIGIN = "a first run on a CPU"
"""What its values are called in `lockstep explain`."""

_RESPONSES, _TOKENS, _STEPS = 32, 128, 6


def is_first_run(named: set[str]) -> bool:
    """Whether a user who set the keys `named` has a model of their own, and says nothing about how large the run is. On the embedded
    task's words too: its presets are for its own model."""
    return "actor_rollout_ref.model.path" in named and not named & set(SIZES)


def first_run_on_cpu(algorithm: str) -> dict[str, Any]:
    """Its values: a few steps of about a minute each for a model of a hundred million parameters on two cores."""
    group = ALGORITHMS[algorithm].get("actor_rollout_ref", {}).get("rollout", {}).get("n", 1)
    return {
        "data": {"train_batch_size": _RESPONSES // group, "max_response_length": _TOKENS},
        # Each step is saved: it took a minute or more, and whoever tries things out interrupts them.
        "trainer": {"total_training_steps": _STEPS, "save_freq": 1, "max_ckpt_to_keep": 2},
    }


def in_words(algorithm: str) -> str:
    """What is smaller than usual, why, and how it is changed."""
    values = first_run_on_cpu(algorithm)
    keys = [f"{section}.{name}={value}" for section, inner in values.items() for name, value in inner.items()]
    return (
        f"{ORIGIN}: there is no GPU and no key says how large the run is, so it is small:\n  {' '.join(keys)}\n"
        f"That is {_RESPONSES} responses a step. Name one of these keys and the others have their usual values; name all of them, with "
        "more steps, and this run goes on."
    )
