"""Runs whose prompts become episodes. What they need of `lockstep.agents` is imported by them alone."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lockstep.config.agent import AgentConfig
from lockstep.config.ppo import PPOConfig
from lockstep.errors import ConfigError, DataError


def check_named(agent: AgentConfig) -> None:
    """The environment and the tools that the configuration names are there. Raises ConfigError, before anything is made or loaded."""
    if not agent.is_on or agent.recorded is not None:
        return
    from lockstep.agents import configured_tools, environment_class

    if agent.environment is not None:
        environment_class(agent.environment)
    if not agent.mcp:  # their servers are started once, by the check of all that there is
        configured_tools(agent)


def episode_rewards(config: PPOConfig, datasets: Iterable[Any], *reward_fns: Any) -> list[Any]:
    """The reward functions, with what environments say of turns; as they are where a prompt has one response.

    Raises ConfigError for an environment, tool or template that cannot be used, and for rows that name environments nobody would play.
    """
    columns = [dataset.column for dataset in datasets if hasattr(dataset, "column")]  # a user's own may have none
    if not config.agent.is_on:
        for name in (name for column in columns for name in column("environment")):
            if isinstance(name, str) and ":" in name:
                raise ConfigError(
                    f"the column environment names {name}, and agent.environment is null: a prompt would be answered once, without it; set "
                    "agent.environment (what a row names stands above it), or leave the column out"
                )
        return list(reward_fns)
    from lockstep.agents import EpisodeRewards, agent_of

    agent = agent_of(config)
    agent.check({_kind(*said) for column in columns for said in zip(column("environment"), column("tools"), strict=True)})
    return [EpisodeRewards(reward_fn, agent) for reward_fn in reward_fns]


def episode_prompt(config: PPOConfig, files: Any) -> Any:
    """What renders a row's prompt as the first messages of its episode; None where something else begins it: an environment's own words, or
    an environment or tools that the row names.

    Raises ConfigError for tools and environments that cannot be used.
    """
    if not config.agent.is_on:
        return None
    from lockstep.agents import agent_of
    from lockstep.data.row_files import RowFiles

    shown = agent_of(config).shown_prompt()
    names_of_rows = {"environment", "tools"} & set(RowFiles([files] if isinstance(files, str | Path) else list(files)).columns)
    return None if names_of_rows else shown


def _kind(environment: Any, tools: Any) -> tuple[str | None, tuple[str, ...] | None]:
    if tools is not None and not (isinstance(tools, list) and all(isinstance(name, str) for name in tools)):
        raise DataError(f"the column tools must have lists of names, not {str(tools)[:200]}; functions are given in agent.tools")
    return environment, None if tools is None else tuple(tools)


def episode_rollout(config: PPOConfig, group: Any) -> Any:
    """The rollout workers, with episodes for responses."""
    from lockstep.agents import EpisodeRollout, Recorder, agent_of
    from lockstep.trainer.ppo.validation import VALIDATION_STEPS

    recorder = Recorder(config.trainer.run_dir) if config.agent.record else None
    return EpisodeRollout(group, agent_of(config), recorder, VALIDATION_STEPS)


def episode_metrics(batch: Any) -> dict[str, float]:
    """agent/*, of a batch of episodes."""
    from lockstep import agents

    return agents.episode_metrics(batch.non_tensor_batch["episode"])
