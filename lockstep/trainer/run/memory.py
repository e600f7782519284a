"""Models that share a device are counted before any is loaded: how much is computed at once is chosen (keys that are auto), and those that
have to be offloaded to host memory in turn are told so."""

import dataclasses
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from typing import TypeVar

from lockstep.errors import ResourceError
from lockstep.planner import (
    PLAIN,
    Footprint,
    Load,
    Needs,
    RolloutNumbers,
    SavedChoice,
    choose,
    describe_chosen,
    describe_plan,
    host_bytes,
)
from lockstep.single_controller.base import RoleGroup

_GB = 2**30

R = TypeVar("R", bound=Hashable)


@dataclasses.dataclass(frozen=True)
class Placed:
    """What `place_models` did."""

    text: str | None
    """Lines about what is offloaded to host memory and what was chosen for keys that are auto; None where there is neither."""
    kept: SavedChoice | None
    """For the checkpoints; None where nothing was chosen."""


def place_models(pool: str, groups: Mapping[R, RoleGroup], loads: Mapping[R, Load], before: SavedChoice | None = None) -> Placed:
    """Plan the memory of one device for the roles whose workers share it, and tell them. `loads` says what a rank of each role computes,
    `before` what was chosen when the run began.

    Workers that have no `memory_needs`, or nothing to say (on a CPU), have nothing offloaded, and get plain numbers. Raises ResourceError
    when the models do not fit on the devices, or what is offloaded into host memory.
    """
    needs = {role: need for role, group in groups.items() if (need := _ask(group, loads[role]))}
    lines, tokens, numbers, kept = [], None, PLAIN, None
    if needs:
        # Ranks differ in what is free, not in their models.
        free = min(rank.free for ranks in needs.values() for rank in ranks)
        load = max((loads[role] for role in needs), key=lambda load: load.step_rows)
        try:
            chosen = choose(_options([ranks[0] for ranks in needs.values()]), load, free, before)
        except ResourceError as error:
            raise ResourceError(f"pool {pool}: {error}") from None
        _check_hosts(pool, next(iter(needs.values())), host_bytes(chosen.models, chosen.plans))
        plan, tokens, numbers, kept = iter(chosen.plans), chosen.tokens, chosen.numbers, chosen.saved(load)
        for role, ranks in needs.items():
            groups[role].place_models({model.name: next(plan) for model in ranks[0].models})
        lines.append(describe_plan(chosen.models, chosen.rollout, chosen.plans, free))
        if chosen.is_new:
            lines.append(
                "warning: less memory is free than when the run began, and its numbers for auto do not fit; sums round otherwise"
            )
    lines.append(describe_chosen(_settle(groups, loads, tokens, numbers)))
    return Placed("\n".join(f"pool {pool}: {line}" for line in lines if line is not None) or None, kept)


def _options(needs: Sequence[Needs]) -> dict[int, Footprint]:
    """What all of them need together, for each size of micro-batches that may be chosen."""
    sizes = sorted({tokens for need in needs for tokens in need.options}) or [0]
    found: dict[int, Footprint] = {}
    for size in sizes:
        parts = [_counted(need, size) for need in needs]
        found[size] = [model for models, _ in parts for model in models], next((r for _, r in parts if r is not None), None)
    return found


def _counted(need: Needs, size: int) -> Footprint:
    """With the largest micro-batches of those that it was counted for that are no larger than `size`."""
    fitting = [tokens for tokens in need.options if tokens <= size]
    return need.options[max(fitting)] if fitting else (need.models, need.rollout)


def _settle(
    groups: Mapping[R, RoleGroup], loads: Mapping[R, Load], tokens: int | None, numbers: RolloutNumbers
) -> dict[str, float]:
    """Give the workers numbers for their keys that are auto; those that were chosen."""
    chosen: dict[str, float] = {}
    for role, group in groups.items():
        if hasattr(group, "settle"):
            chosen |= group.settle(dataclasses.replace(loads[role], auto_tokens=tokens), numbers)[0]
    return chosen


def _ask(group: RoleGroup, load: Load) -> list[Needs]:
    """What the role needs, rank by rank; empty where its workers do not say."""
    answers = group.memory_needs(load) if hasattr(group, "memory_needs") else []
    return [] if None in answers else answers


def _check_hosts(pool: str, ranks: list[Needs], each: int) -> None:
    """Raise ResourceError unless `each` bytes for every rank fit into the host memory of its machine."""
    for machine, count in Counter(rank.machine for rank in ranks).items():
        host = min(rank.host for rank in ranks if rank.machine == machine)
        if each * count > host:
            raise ResourceError(
                f"pool {pool}: weights and moments that would rest in the host memory of {machine} take {each * count / _GB:.3g} GB, "
                f"{count} times {each / _GB:.3g}, and {host / _GB:.3g} GB are free; raise trainer.n_gpus_per_node or trainer.nnodes, so "
                "that more devices share the models, or set model.lora_rank to train adapters"
            )
