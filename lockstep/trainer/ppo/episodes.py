"""Runs whose prompts become episodes. Only they import `lockstep.agents`."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lockstep.config.agent import AgentConfig
from lockstep.config.ppo import PPOConfig
from lockstep.errors import ConfigError, DataError
from lockstep.trainer.ppo.interfaces import Rollout


def check_named(agent: AgentConfig) -> None:
    """Raise ConfigError, before anything is made or loaded, unless the named environment and tools exist."""
    if not agent.is_on or agent.recorded is not None:
        return
    from lockstep.agents import configured_tools, environment_class

    if agent.environment is not None:
        environment_class(agent.environment)
    if not agent.mcp:  # their servers are started once, by the check of all that there is
        configured_tools(agent)


def episode_rewards(config: PPOConfig, datasets: Iterable[Any], *reward_fns: Any) -> list[Any]:
    """Return the reward functions, with the environments' rewards of turns if prompts become episodes.

    Raise ConfigError for an environment, tool or template that cannot be used, and for rows that name environments in a run without.
    """
    columns = [dataset.column for dataset in datasets if hasattr(dataset, "column")]  # a user's own may have none
    if not config.agent.is_on:
        named = [name for column in columns for name in column("environment")]
        for name in named:
            if isinstance(name, str) and ":" in name:
                raise ConfigError(
                    f"the column environment names {name}, and agent.environment is null: a prompt would be answered once, without it; set "
                    "agent.environment (what a row names stands above it), or leave the column out"
                )
        return list(reward_fns)
    from lockstep.agents import EpisodeRewards, agent_of

    agent = agent_of(config)
    kinds = set()
    for column in columns:
        for environment, tools in zip(column("environment"), column("tools"), strict=True):
            kinds.add(_kind(environment, tools))
    agent.check(kinds)
    return [EpisodeRewards(reward_fn, agent) for reward_fn in reward_fns]


def episode_prompt(config: PPOConfig, files: Any) -> Any:
    """Return what renders a row's prompt as the first messages of its episode; None if the environment writes these, or if rows name
    environments or tools.

    Raise ConfigError for tools and environments that cannot be used.
    """
    if not config.agent.is_on:
        return None
    from lockstep.agents import agent_of
    from lockstep.data.row_files import RowFiles

    shown = agent_of(config).shown_prompt()
    columns = RowFiles([files] if isinstance(files, str | Path) else list(files)).columns
    rows_differ = "environment" in columns or "tools" in columns
    return None if rows_differ else shown


def _kind(environment: Any, tools: Any) -> tuple[str | None, tuple[str, ...] | None]:
    if tools is not None and not (isinstance(tools, list) and all(isinstance(name, str) for name in tools)):
        raise DataError(f"the column tools must have lists of names, not {str(tools)[:200]}; functions are given in agent.tools")
    return environment, None if tools is None else tuple(tools)


def episode_rollout(config: PPOConfig, group: Any) -> Rollout:
    """Return the rollout workers with episodes for responses."""
    from lockstep.agents import EpisodeRollout, Recorder, agent_of
    from lockstep.trainer.ppo.validation import VALIDATION_STEPS

    recorder = Recorder(config.trainer.run_dir) if config.agent.record else None
    return EpisodeRollout(group, agent_of(config), recorder, VALIDATION_STEPS)


def episode_metrics(batch: Any) -> dict[str, float]:
    """Return agent/* of a batch of episodes."""
    from lockstep import agents

    return agents.episode_metrics(batch.non_tensor_batch["episode"])
