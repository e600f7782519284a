"""Models that share a device are counted before any is loaded, and those that have to be offloaded to host memory in turn are told so."""

from collections import Counter
from collections.abc import Hashable, Mapping
from typing import TypeVar

from lockstep.errors import ResourceError
from lockstep.planner.count import Load
from lockstep.planner.memory import describe_plan, host_bytes, plan_memory
from lockstep.planner.needs import Needs
from lockstep.single_controller.base import RoleGroup

_GB = 2**30

R = TypeVar("R", bound=Hashable)


def place_models(pool: str, groups: Mapping[R, RoleGroup], loads: Mapping[R, Load]) -> str | None:
    """Plan the memory of one device for the roles whose workers share it, and tell them. `loads` says what a rank of each role computes.

    Returns a line about what is offloaded to host memory, None where nothing is. Workers that have no `memory_needs`, or nothing to say
    (on a CPU), are left as they are. Raises ResourceError when the models do not fit on the devices, or what is offloaded into host memory.
    """
    needs = {role: need for role, group in groups.items() if (need := _ask(group, loads[role]))}
    if not needs:
        return None
    # Ranks differ in what is free, not in their models.
    models = [model for ranks in needs.values() for model in ranks[0].models]
    rollout = next((ranks[0].rollout for ranks in needs.values() if ranks[0].rollout is not None), None)
    everyone = [rank for ranks in needs.values() for rank in ranks]
    free = min(rank.free for rank in everyone)
    try:
        plans = plan_memory(models, rollout, free)
    except ResourceError as error:
        raise ResourceError(f"pool {pool}: {error}") from None
    _check_hosts(pool, next(iter(needs.values())), host_bytes(models, plans))
    plan = iter(plans)
    for role, ranks in needs.items():
        groups[role].place_models({model.name: next(plan) for model in ranks[0].models})
    line = describe_plan(models, rollout, plans, free)
    return None if line is None else f"pool {pool}: {line}"


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
