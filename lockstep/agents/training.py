"""Episodes in a training run: what the driver puts before its rollout workers and around its reward function."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lockstep.agents.environment import Environment
from lockstep.agents.recorded import Recorder
from lockstep.agents.rows import Agent
from lockstep.protocol import DataProto
from lockstep.rewards.outcome import Failure

if TYPE_CHECKING:
    from lockstep.config.ppo import PPOConfig


def agent_of(config: PPOConfig) -> Agent:
    """What the config says of episodes."""
    model = config.actor_rollout_ref.model
    kwargs = dict(config.data.apply_chat_template_kwargs)
    return Agent(config.agent, str(model.path), model.trust_remote_code, kwargs, config.data.max_prompt_length)


class EpisodeRollout:
    """A group of rollout workers whose responses are episodes. With a `recorder`, what environments say in steps below `last_step` is
    kept on disk."""

    reads = None
    """Object columns that are sent: all, since environments may read any."""

    def __init__(self, group: Any, agent: Agent, recorder: Recorder | None = None, last_step: int = 0) -> None:
        self._group, self._agent, self._recorder, self._last_step = group, agent, recorder, last_step

    def generate_sequences(self, prompts: DataProto, step: int, **arguments: Any) -> DataProto:
        """`stages.generate` asks for it."""
        episodes: DataProto = self._group.run_episodes(prompts, agent=self._agent, step=step, **arguments)
        if self._recorder is not None and step < self._last_step:
            names = {"", *(name or "" for name in prompts.non_tensor_batch.get("environment", ()))}
            self._recorder.write(step, episodes, prompts, {name: self._agent.kind(name or None) for name in sorted(names)})
        return episodes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)


class EpisodeRewards:
    """A reward function for episodes: what the environment said of turns, and, where the environment leaves it to it, what `judge` says
    of the policy's last turn. An episode that could not be played has no reward."""

    def __init__(self, judge: Any, kind: type[Environment]) -> None:
        self._judge: Any = judge if kind.is_judged else None
        if self._judge is not None and hasattr(self._judge, "begin"):
            self.begin = self._judge.begin

    def check(self, tags: Any, **arguments: bool) -> None:
        """See RewardManager."""
        if hasattr(self._judge, "check"):
            self._judge.check(tags, **arguments)

    def __call__(self, data: DataProto, return_dict: bool = True, ragged: bool = True, scoring: Any = None) -> dict[str, Any]:
        """As `trainer.ppo.rewards.score` reads it."""
        rewards = data.ragged("turn_rewards")
        told = data.non_tensor_batch["episode"]
        result: dict[str, Any] = {"reward_extra_info": {}, "reward_parts": {}, "failures": [None] * len(data)}
        if self._judge is not None:
            arguments = {} if scoring is None else {"scoring": scoring}
            result = self._judge(data, return_dict=True, ragged=True, **arguments)
            rewards = rewards.like(rewards.values + result["reward_tensor"].values)
        failures = [
            Failure("environment", episode["error"]) if episode["error"] is not None else failure
            for episode, failure in zip(told, result["failures"], strict=True)
        ]
        extra = _numbers(list(told)) | result["reward_extra_info"] | {"episode": list(told)}
        return result | {"reward_tensor": rewards, "failures": failures, "reward_extra_info": extra}

    def close(self) -> None:
        """End what the judge has started."""
        if hasattr(self._judge, "close"):
            self._judge.close()


def _numbers(told: Sequence[dict[str, Any]]) -> dict[str, list[Any]]:
    """turns, calls, faults, and the numbers of `info`, of each episode: None where it has none. Validation makes means of them."""
    named = [{name: episode[name] for name in ("turns", "calls", "faults")} | episode["info"] for episode in told]
    kept = {name for episode in named for name, value in episode.items() if isinstance(value, int | float)}
    missing = [episode["error"] is not None for episode in told]
    return {name: [None if m else e.get(name) for e, m in zip(named, missing, strict=True)] for name in sorted(kept)}
