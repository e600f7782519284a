"""Episode: the tokens of one conversation between a policy and its environment, its columns in a batch, and its metrics."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lockstep.agents.environment import Message, Turn
from lockstep.protocol import DataProto, Ragged
from lockstep.workers.rollout.request import Completion

MISSING = "error"
"""finish_reason of an episode whose environment failed: the episode has no tokens and no reward."""


@dataclass(slots=True)
class Episode:
    """Grows turn by turn. Tokens after the prompt come from the policy, with a log-prob, or from the environment, without."""

    prompt_ids: list[int]
    ids: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    """1 for a token that the policy sampled."""
    log_probs: list[float] = field(default_factory=list)
    turn: list[int] = field(default_factory=list)
    """The policy's turn that a token belongs to, from 1; the environment's tokens belong to the turn before them."""
    restarts: list[int] = field(default_factory=list)
    """1 for a token that begins a new context: the policy no longer sees the tokens before it."""
    rewards: list[float] = field(default_factory=list)
    """The reward of a turn at its last sampled token; 0 elsewhere."""
    context: list[int] = field(default_factory=list)
    """The tokens that the policy sees now, with the prompt."""
    turns: int = 0
    contexts: int = 1
    last_turn: list[int] = field(default_factory=list)
    """The tokens of the policy's last turn, which a reward function judges."""
    finish_reason: str = ""
    messages: list[Message] = field(default_factory=list)
    """The conversation as messages, for people."""
    heard: list[dict[str, Any]] = field(default_factory=list)
    """For each turn of the environment its number of messages, reward, done, info and faults: what a replay needs."""
    seed: int = 0
    """The environment's."""
    info: dict[str, Any] = field(default_factory=dict)
    calls: int = 0
    """Calls that could be made."""
    faults: int = 0
    """Malformed and failed calls."""
    retries: int = 0
    environment_s: float = 0.0
    wait_s: float = 0.0
    """How long the engine was idle because all episodes of this call waited for their environments."""
    error: str | None = None

    def __post_init__(self) -> None:
        self.context = list(self.prompt_ids)

    def add_turn(self, turn: Turn) -> None:
        """Add a turn of the environment."""
        self.messages += turn.messages
        self.info |= turn.info
        self.calls = self.calls - turn.faults
        self.faults = self.faults + turn.faults
        names = ("reward", "done", "info", "faults")
        self.heard.append({"messages": len(turn.messages)} | {name: getattr(turn, name) for name in names})
        if turn.reward is not None:
            self.add_reward(float(turn.reward))

    def add_policy(self, completion: Completion) -> None:
        """Add a turn of the policy."""
        self.turns += 1
        self.last_turn = completion.ids.tolist()
        self._add(self.last_turn, completion.log_probs.tolist(), 1)

    def add_environment(self, ids: Sequence[int], is_new_context: bool = False) -> None:
        """Add the tokens between two turns, or of a new context."""
        if is_new_context:
            self.contexts = self.contexts + 1
            self.context = []
        self._add(ids, [float("nan")] * len(ids), 0)
        if is_new_context:
            self.restarts[-len(ids)] = 1

    def add_reward(self, reward: float) -> None:
        """Add a reward to the policy's last turn."""
        last = max((i for i, own in enumerate(self.mask) if own), default=None)
        if last is not None:
            self.rewards[last] += reward

    def _add(self, ids: Sequence[int], log_probs: Sequence[float], own: int) -> None:
        self.ids += ids
        self.context += ids
        self.restarts += [0] * len(ids)
        self.log_probs += log_probs
        self.mask += [own] * len(ids)
        self.turn += [self.turns] * len(ids)
        self.rewards += [0.0] * len(ids)

    def record(self) -> dict[str, Any]:
        """Return what is recorded of the episode besides its tokens."""
        names = (
            "turns", "contexts", "calls", "faults", "retries", "environment_s", "wait_s", "seed", "messages", "heard", "info", "error",
        )  # fmt: skip
        return {name: getattr(self, name) for name in names}


def missing(prompt_ids: Sequence[int], error: str, retries: int, environment_s: float, seed: int) -> Episode:
    """Return an episode whose environment failed."""
    prompt = list(prompt_ids)
    return Episode(prompt, finish_reason=MISSING, error=error, retries=retries, environment_s=environment_s, seed=seed)


def episode_columns(episodes: Sequence[Episode], has_contexts: bool = False) -> DataProto:
    """Return the columns prompts, responses, response_mask, rollout_log_probs, turn, turn_rewards, last_turn, finish_reason and episode;
    and restarts, if episodes may have several contexts."""

    def ragged(name: str, dtype: torch.dtype) -> Ragged:
        rows: list[Tensor] = [torch.tensor(getattr(episode, name), dtype=dtype) for episode in episodes]
        return Ragged.from_rows(rows, dtype=dtype)

    kinds = {
        "prompts": ("prompt_ids", torch.int64),
        "responses": ("ids", torch.int64),
        "response_mask": ("mask", torch.int64),
        "rollout_log_probs": ("log_probs", torch.float32),
        "turn": ("turn", torch.int64),
        "turn_rewards": ("rewards", torch.float32),
        "last_turn": ("last_turn", torch.int64),
    }
    if has_contexts:
        kinds["restarts"] = ("restarts", torch.int64)
    columns = {column: ragged(name, dtype) for column, (name, dtype) in kinds.items()}
    objects = {"finish_reason": [e.finish_reason for e in episodes], "episode": [e.record() for e in episodes]}
    return DataProto.from_dict(columns, objects)


def episode_metrics(episodes: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return agent/*: means over the played episodes, the number of missing episodes, and how long generation waited for environments."""
    played = [episode for episode in episodes if episode["error"] is None]
    metrics = {"agent/missing": float(len(episodes) - len(played))}
    metrics["agent/wait_s"] = max(episode["wait_s"] for episode in episodes)
    if not played:
        return metrics
    for name in ("turns", "contexts", "calls", "faults", "environment_s", "retries"):
        metrics[f"agent/{name}"] = sum(episode[name] for episode in played) / len(played)
    goes_on = sum(episode["turns"] - 1 for episode in played)
    metrics["agent/broken_prefix_ratio"] = sum(episode["contexts"] - 1 for episode in played) / goes_on if goes_on else 0.0
    calls, faults = (sum(episode[name] for episode in played) for name in ("calls", "faults"))
    metrics["agent/bad_call_ratio"] = faults / (calls + faults) if calls + faults else 0.0
    infos = [episode["info"] for episode in played]
    for name in sorted({name for info in infos for name in info}):
        values = [float(info[name]) for info in infos if isinstance(info.get(name), int | float)]
        if values:
            metrics[f"agent/info/{name}"] = sum(values) / len(values)
    return metrics
