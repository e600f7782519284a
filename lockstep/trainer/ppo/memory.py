"""Models that share a device are counted before any is loaded, and those that have to rest in host memory in turn are told so."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

from lockstep.config.ppo import PPOConfig
from lockstep.errors import ResourceError
from lockstep.planner.count import Load
from lockstep.planner.memory import describe_plan, plan_memory
from lockstep.planner.needs import Needs
from lockstep.single_controller.base import RoleGroup


def place_models(pool: str, groups: Mapping[Enum, RoleGroup], config: PPOConfig) -> str | None:
    """Plan the memory of one device for the roles whose workers share it, and tell them.

    Returns a line about what rests in host memory, None where nothing does. Workers that have no `memory_needs`, or none to tell
    (on a CPU), are left as they are. Raises ResourceError when the models do not fit.
    """
    needs = {
        role: need for role, group in groups.items() if (need := _ask(group, _load(config, role, group.world_size))) is not None
    }
    if not needs:
        return None
    models = [model for need in needs.values() for model in need.models]
    rollout = next((need.rollout for need in needs.values() if need.rollout is not None), None)
    free = min(need.free for need in needs.values())
    try:
        placements = plan_memory(models, rollout, free)
    except ResourceError as error:
        raise ResourceError(f"pool {pool}: {error}") from None
    rest = iter(placements)
    for role, need in needs.items():
        groups[role].place_models({model.name: next(rest) for model in need.models})
    line = describe_plan(models, rollout, placements, free)
    return None if line is None else f"pool {pool}: {line}"


def _load(config: PPOConfig, role: Enum, ranks: int) -> Load:
    """What one of `ranks` ranks of this role computes at once."""
    data, n = config.data, config.actor_rollout_ref.rollout.n
    mini_batch = config.critic_mini_batch_prompts if role.name == "Critic" else config.actor_mini_batch_prompts
    return Load(
        longest=data.max_prompt_length + data.max_response_length,
        step_rows=-(-data.train_batch_size * n // ranks),
        update_rows=-(-mini_batch * n // ranks),
    )


def _ask(group: RoleGroup, load: Load) -> Needs | None:
    """What the role's workers need, with what the fullest of their devices has; None where they do not say."""
    if not hasattr(group, "memory_needs"):
        return None
    answers = group.memory_needs(load)
    if any(answer is None for answer in answers):
        return None
    return Needs(min(answer.free for answer in answers), answers[0].models, answers[0].rollout)
