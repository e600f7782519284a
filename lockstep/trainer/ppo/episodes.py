"""Runs whose prompts become episodes. What they need of `lockstep.agents` is imported by them alone."""

from typing import Any

from lockstep.config.ppo import PPOConfig


def episode_rewards(config: PPOConfig, *reward_fns: Any) -> list[Any]:
    """The reward functions, with what environments say of turns. Raises ConfigError for an environment, tool or template that cannot be
    used."""
    from lockstep.agents.training import EpisodeRewards, agent_of

    kind = agent_of(config).check()
    return [EpisodeRewards(reward_fn, kind) for reward_fn in reward_fns]


def episode_rollout(config: PPOConfig, group: Any) -> Any:
    """The rollout workers, with episodes for responses."""
    from lockstep.agents.recorded import Recorder
    from lockstep.agents.training import EpisodeRollout, agent_of
    from lockstep.trainer.ppo.validation import VALIDATION_STEPS

    recorder = Recorder(config.trainer.run_dir) if config.agent.record else None
    return EpisodeRollout(group, agent_of(config), recorder, VALIDATION_STEPS)


def episode_metrics(batch: Any) -> dict[str, float]:
    """agent/*, of a batch of episodes."""
    from lockstep.agents import rows

    return rows.episode_metrics(batch.non_tensor_batch["episode"])
