"""Episodes in a training run: the driver wraps its rollout workers in `EpisodeRollout` and its reward function in `EpisodeRewards`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

from lockstep.agents.agent import Agent
from lockstep.agents.recording import Recorder
from lockstep.protocol import DataProto
from lockstep.rewards.outcome import Failure

if TYPE_CHECKING:
    from lockstep.config.sampling import SamplingParams


class EpisodeWorkers(Protocol):
    """A group of rollout workers that plays episodes."""

    def receiving(self, handle: Callable[[Any], None], /) -> AbstractContextManager[Any]:
        """See Rollout (trainer/ppo/interfaces.py)."""

    def run_episodes(self, prompts: DataProto, *, agent: Agent, sampling: SamplingParams, step: int, on_finished: Any) -> DataProto:
        """Return an episode for each prompt, by `play_rows`."""


class EpisodeRollout:
    """A group of rollout workers whose responses are episodes. A `recorder` writes the environments' turns of steps below `last_step`."""

    reads: Sequence[str] | None = None
    """The object columns that are sent: all, since environments may read any."""

    def __init__(self, group: EpisodeWorkers, agent: Agent, recorder: Recorder | None = None, last_step: int = 0) -> None:
        self._group = group
        self._agent = agent
        self._recorder = recorder
        self._last_step = last_step

    def receiving(self, handle: Callable[[Any], None]) -> AbstractContextManager[Any]:
        """See Rollout (trainer/ppo/interfaces.py)."""
        return self._group.receiving(handle)

    def generate_sequences(self, prompts: DataProto, *, sampling: SamplingParams, step: int, on_finished: Any = None) -> DataProto:
        """Return an episode for each prompt."""
        agent = self._agent
        episodes = self._group.run_episodes(prompts, agent=agent, sampling=sampling, step=step, on_finished=on_finished)
        self.record(episodes, prompts, step)
        return episodes

    def record(self, episodes: DataProto, prompts: DataProto, step: int) -> None:
        """Record the environments' turns if a recorder is set. A journal, which does not play episodes again, calls this too."""
        if self._recorder is not None and step < self._last_step:
            names = {"", *(name or "" for name in prompts.non_tensor_batch.get("environment", ()))}
            self._recorder.write(step, episodes, prompts, {name: self._agent.kind(name or None) for name in sorted(names)})


class EpisodeRewards:
    """A reward function for episodes: the environment's rewards of turns, plus the score of `judge` for the policy's last turn if the
    environment's class has `is_judged`. The reward of an episode that could not be played is missing."""

    def __init__(self, judge: Any, agent: Agent) -> None:
        self._judge = judge
        self._agent = agent
        if hasattr(judge, "begin"):
            self.begin = self._begin

    def check(self, tags: Any, **arguments: bool) -> None:
        """See RewardManager."""
        if self._agent.environment_class().is_judged and hasattr(self._judge, "check"):
            self._judge.check(tags, **arguments)

    def _begin(self, data: DataProto) -> _PartialScoring | None:
        """See RewardManager."""
        rows = self._judged(data)
        if not rows:
            return None
        return _PartialScoring(self._judge.begin(data.select_idxs(rows)), rows)

    def _judged(self, data: DataProto) -> list[int]:
        """Return the rows whose environments leave a reward to the judge."""
        names = data.non_tensor_batch.get("environment", [None] * len(data))
        return [row for row, name in enumerate(names) if self._agent.environment_class(name).is_judged]

    def __call__(self, data: DataProto, return_dict: bool = True, ragged: bool = True, scoring: Any = None) -> dict[str, Any]:
        """Return the dict that `trainer.ppo.rewards.score` reads."""
        episodes = list(data.non_tensor_batch["episode"])
        rewards = data.ragged("turn_rewards")
        result: dict[str, Any] = {"reward_extra_info": {}, "reward_parts": {}, "failures": [None] * len(data)}
        if rows := self._judged(data):
            arguments = {} if scoring is None else {"scoring": scoring.begun}
            judged = self._judge(data.select_idxs(rows), return_dict=True, ragged=True, **arguments)
            rewards = rewards.like(rewards.values.clone())
            whole = rewards.rows()
            for row, scores in zip(rows, judged["reward_tensor"].rows(), strict=True):
                whole[row].add_(scores)
            result = {name: _spread(judged[name], rows, len(data)) for name in result}
        failures = [
            Failure("environment", episode["error"]) if episode["error"] is not None else failure
            for episode, failure in zip(episodes, result["failures"], strict=True)
        ]
        extra = _numbers(episodes) | result["reward_extra_info"] | {"episode": episodes}
        return result | {"reward_tensor": rewards, "failures": failures, "reward_extra_info": extra}

    def close(self) -> None:
        """Close the judge."""
        if hasattr(self._judge, "close"):
            self._judge.close()


class _PartialScoring:
    """A judge's scoring of some rows of the batch."""

    def __init__(self, begun: Any, rows: Sequence[int]) -> None:
        self.begun = begun
        self._numbers = {row: number for number, row in enumerate(rows)}

    def add(self, row: int, response_ids: Any) -> None:
        """Submit the policy's last turn of a row."""
        if row in self._numbers:
            self.begun.add(self._numbers[row], response_ids)


def _spread(found: Any, rows: Sequence[int], count: int) -> Any:
    """Spread lists for some rows to lists for all rows, with None for the others."""
    if isinstance(found, dict):
        return {name: _spread(values, rows, count) for name, values in found.items()}
    spread: list[Any] = [None] * count
    for row, value in zip(rows, found, strict=True):
        spread[row] = value
    return spread


def _numbers(episodes: Sequence[dict[str, Any]]) -> dict[str, list[Any]]:
    """Return turns, calls, faults and the numbers of `info` of each episode, None if missing. Validation averages them."""
    entries: list[dict[str, Any]] = []
    names: set[str] = set()
    for episode in episodes:
        entry = {name: episode[name] for name in ("turns", "calls", "faults")} | episode["info"]
        names.update(name for name, value in entry.items() if isinstance(value, int | float))
        entries.append(entry if episode["error"] is None else {})
    return {name: [entry.get(name) for entry in entries] for name in sorted(names)}
