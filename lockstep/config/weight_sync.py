"""Which way weights go from the trainer to what generates: `actor_rollout_ref.rollout.weight_sync`."""

import os

from lockstep.errors import ConfigError

WEIGHT_SYNCS = ("auto", "shared", "ipc", "broadcast", "disk")
"""Names that rollout.weight_sync accepts."""
_KEY = "actor_rollout_ref.rollout.weight_sync"


def choose_weight_sync(
    asked: str, engine: str, *, hybrid: bool, same_process: bool, same_machine: bool, cuda: bool, linux: bool | None = None
) -> str:
    """shared, ipc, broadcast or disk.

    `hybrid`: the actor's worker generates itself. Otherwise `same_process` and `same_machine` say where the rollout's workers are, seen
    from the actor's. Raises ConfigError when what was asked for cannot work.
    """
    possible = _possible(engine, hybrid, same_process, same_machine, cuda, hasattr(os, "memfd_create") if linux is None else linux)
    if asked == "auto":
        return possible[0]
    if asked not in possible:
        where = "in the actor's worker" if hybrid else "in workers of its own"
        raise ConfigError(f"{_KEY}={asked} cannot serve rollout.name={engine} {where}; choose one of: auto, {', '.join(possible)}")
    return asked


def _possible(engine: str, hybrid: bool, same_process: bool, same_machine: bool, cuda: bool, linux: bool) -> list[str]:
    """The methods that work, the best one first."""
    if engine == "sglang":  # its server reads files only
        return ["disk"]
    if hybrid and engine != "vllm":
        return ["shared"]
    ipc = ["ipc"] if linux and same_machine else []
    if hybrid or same_process:  # one process cannot be two members of a broadcast
        return [*ipc, "disk"]
    return ["broadcast", *ipc, "disk"] if cuda or not ipc else [*ipc, "broadcast", "disk"]
