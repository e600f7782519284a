"""Play episodes. Each episode is a coroutine; coroutines and the engine's passes take turns on one thread (episode_loop.py).

An episode continues as soon as its own environment has answered; there are no rounds. The key-value pages of earlier turns are kept, so a
turn costs only its new tokens.
"""

from __future__ import annotations

import functools
import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from lockstep.agents.chat_template import TurnTemplate
from lockstep.agents.environment import Action, Fault, Message, ToolCall, Turn
from lockstep.agents.episode import Episode, missing
from lockstep.agents.episode_loop import Encoding, EngineCall, EpisodeLoop
from lockstep.agents.hosts import EnvironmentFailed, Host, Make, check_turn, make_host
from lockstep.agents.parsers import Parse, as_json
from lockstep.config.sampling import SamplingParams
from lockstep.data.encoder import truncate
from lockstep.errors import DataError
from lockstep.utils.garbage import rare_collections
from lockstep.workers.rollout.base import RolloutEngine
from lockstep.workers.rollout.request import Completion, Request
from lockstep.workers.rollout.stream import Stream

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class EpisodeTask:
    """An episode to play."""

    row: dict[str, Any]
    """The row of the data set that `Environment.reset` gets."""
    prompt_ids: list[int]
    """The row's prompt, shown for an episode that could not be played."""
    key: tuple[int, int, int]
    """(step, prompt, sample): decides the policy's random numbers."""
    seed: int
    """The environment's seed: equal for all samples of a prompt, so that a group plays one game."""
    make: Make
    kwargs: dict[str, Any]
    """The environment is make(**kwargs)."""
    template: TurnTemplate
    schemas: dict[str, dict[str, Any]]
    """Tool -> JSON schema of its parameters."""


@dataclass(frozen=True)
class EpisodeLimits:
    """The limits of an episode."""

    max_turns: int
    max_turn_tokens: int | None
    """Tokens of the policy in one turn."""
    max_observation_tokens: int | None
    """Tokens of one message of the environment; the rest is cut off, and the message says so."""
    max_environments: int
    """Episodes at once."""
    step_timeout_s: float
    episode_timeout_s: float
    """Seconds that an episode may spend in its environment."""
    retries: int
    """How often an episode restarts after a failure of its environment."""
    max_prompt_tokens: int | None = None
    """Tokens of the first messages."""
    prompt_side: str | None = None
    """Side on which too long first messages are cut: left, right or middle (data.truncation). None: the episode fails."""


class Player:
    """Plays episodes on an engine."""

    def __init__(
        self,
        engine: RolloutEngine,
        tokenizer: PreTrainedTokenizerBase,
        parse: Parse,
        sampling: SamplingParams,
        limits: EpisodeLimits,
        inner_ids: Set[int] = frozenset(),
    ) -> None:
        """`sampling.max_tokens` limits the tokens after the prompt, the environment's included. `inner_ids` end no turn, even if the
        template writes them at a turn's end."""
        self._inner_ids = inner_ids
        self._engine = engine
        self._tokenizer = tokenizer
        self._parse = parse
        self._sampling = sampling
        self._limits = limits
        self._longest_token = _longest_token(tokenizer)

    def play(self, tasks: Sequence[EpisodeTask], on_finished: Callable[[int, Episode], None] | None = None) -> list[Episode]:
        """Return the episodes in order. `on_finished(number, episode)` is called as each ends, between two passes."""
        episodes: dict[int, Episode] = {}
        hosts = _Hosts(self._limits.step_timeout_s)

        async def play(number: int, task: EpisodeTask) -> None:
            episodes[number] = await self._episode(task, hosts, stream)
            if on_finished is not None:
                on_finished(number, episodes[number])

        try:
            with self._engine.open(self._sampling) as stream, rare_collections():
                driver = EpisodeLoop(stream)
                driver.run((play(number, task) for number, task in enumerate(tasks)), self._limits.max_environments)
        finally:
            hosts.close(waits=len(episodes) == len(tasks))
        for episode in episodes.values():
            episode.wait_s = driver.idle_s
        return [episodes[number] for number in range(len(tasks))]

    async def _episode(self, task: EpisodeTask, hosts: _Hosts, stream: Stream) -> Episode:
        """Play one episode. If its environment fails, restart it with the same key and so the same tokens."""
        seconds = 0.0
        for attempt in range(self._limits.retries + 1):
            with hosts.one(task.make) as host:
                try:
                    episode: Episode | None = await self._attempt(task, host, stream)
                except EnvironmentFailed as error:
                    episode = None
                    failure = str(error)
                seconds += host.seconds
                try:
                    await host.ending()
                except EnvironmentFailed:  # the episode is over
                    host.close(waits=False)
            if episode is not None:
                episode.retries = attempt
                return episode
        return missing(task.prompt_ids, failure, self._limits.retries, seconds, task.seed)

    async def _attempt(self, task: EpisodeTask, host: Host, stream: Stream) -> Episode:
        limits = self._limits
        template = task.template
        if (start := host.starting(task.make, task.kwargs)) is not None:
            await start
        turn = check_turn(await host.beginning(task.make, task.kwargs, task.row, task.seed), is_first=True)
        if limits.prompt_side in (None, "right"):  # the others keep the end
            self._shorten(turn, limits.max_prompt_tokens or self._engine.context, is_first=True)
        with _refusals():
            text = template.start_text(turn.messages)
        new = await Encoding(template, text)
        previous = None
        if limits.max_prompt_tokens is not None and limits.prompt_side is not None:
            new = truncate(new, limits.max_prompt_tokens, limits.prompt_side)
        if limits.max_prompt_tokens is not None and len(new) > limits.max_prompt_tokens:
            raise EnvironmentFailed(
                f"the first messages have {len(new)} tokens or more, tools included, and data.max_prompt_length="
                f"{limits.max_prompt_tokens}; raise it (data.filter_overlong_prompts leaves such rows out if episodes begin with them)"
            )
        episode = Episode(list(new), seed=task.seed)
        episode.add_turn(turn)
        conversation: list[Message | Action] = list(turn.messages)
        stops = tuple({*self._sampling.stop_token_ids, *(template.end_ids - self._inner_ids)})
        try:
            while not episode.finish_reason:
                left = self._left(episode, len(episode.context))
                most = left if limits.max_turn_tokens is None else min(left, limits.max_turn_tokens)
                key = (*task.key[:2], task.key[2] + ((episode.contexts - 1) << 32))
                request = Request(
                    torch.from_numpy(np.array(new)), key, max_tokens=most, stop_token_ids=stops, keep=True, continues=previous
                )
                index, completion = await EngineCall(request)
                if previous is not None:
                    stream.release(previous)
                previous = index
                if completion.finish_reason == "error":
                    raise EnvironmentFailed(f"the policy could not answer: {completion.error}")
                episode.add_policy(completion)
                new, is_new_context = await self._answer_turn(task, host, episode, completion, conversation, stops)
                if is_new_context:
                    stream.release(previous)
                    previous = None
        finally:
            if previous is not None:
                stream.release(previous)
        episode.environment_s = host.seconds
        return episode

    def _left(self, episode: Episode, used: int) -> int:
        """Return how many tokens are left in the episode's budget and in the model's context, of which `used` are taken."""
        left = self._sampling.max_tokens - len(episode.ids)
        return left if self._engine.context is None else min(left, self._engine.context - used)

    async def _answer_turn(
        self,
        task: EpisodeTask,
        host: Host,
        episode: Episode,
        completion: Completion,
        conversation: list[Message | Action],
        stops: Sequence[int],
    ) -> tuple[list[int], bool]:
        """Let the environment answer the policy's turn. Return the tokens before the next turn and whether they start a new context; at the
        end of the episode set `finish_reason`."""
        action = self._read(task, completion, stops)
        conversation.append(action)
        episode.messages.append(_shown(action))
        if action.is_cut and self._left(episode, len(episode.context)) <= 0:  # a call that is cut here is not a fault
            episode.finish_reason = "length"
            return [], False
        episode.calls += len(action.calls)
        episode.faults += len(action.faults)
        turn = check_turn(await host.stepping(action))
        self._shorten(turn, self._sampling.max_tokens)
        if host.seconds > self._limits.episode_timeout_s:
            raise EnvironmentFailed(f"the environment took {host.seconds:.0f} s, more than agent.episode_timeout_s allows")
        episode.add_turn(turn)
        conversation += turn.messages
        if turn.done:
            episode.finish_reason = "stop"
            return [], False
        if episode.turns >= self._limits.max_turns:
            episode.finish_reason = "length"
            return [], False
        new, is_new_context = await self._next_tokens(task.template, conversation, episode.context)
        if len(new) >= self._left(episode, 0 if is_new_context else len(episode.context)):
            episode.finish_reason = "length"
            return [], False
        episode.add_environment(new, is_new_context)
        return new, is_new_context

    async def _next_tokens(
        self, template: TurnTemplate, conversation: list[Message | Action], context: list[int]
    ) -> tuple[list[int], bool]:
        """See TurnTemplate.next_tokens."""
        with _refusals():
            if template.renders_conversation:
                return template.next_tokens(conversation, context)
            text = template.next_text(conversation)
        return template.after(conversation, await Encoding(template, text)), False

    def _read(self, task: EpisodeTask, completion: Completion, stops: Sequence[int]) -> Action:
        """Return the policy's turn with its calls."""
        ids = completion.ids.tolist()
        if ids and ids[-1] in stops:
            ids = ids[:-1]
        text = str(self._tokenizer.decode(ids, skip_special_tokens=False))
        parsed = self._parse(text, task.schemas)
        read = [as_json(call) for call in parsed.calls]
        calls = tuple(each for each in read if isinstance(each, ToolCall))
        faults = (*(each for each in read if isinstance(each, Fault)), *parsed.faults)
        if len(calls) > 1 and not task.template.has_several_calls:
            faults = (*faults, Fault("only one tool may be called in a turn; the others were not called"))
            calls = calls[:1]
        return Action(text, parsed.content, calls, faults, is_cut=completion.finish_reason == "length")

    def _shorten(self, turn: Turn, room: int | None, is_first: bool = False) -> None:
        """Cut the turn's messages to the limit. Without a limit, cut them to `room`, which they cannot exceed anyway, so that gigabytes are
        never tokenised. The first messages are the question and have no limit."""
        limit = None if is_first else self._limits.max_observation_tokens
        most = limit or room
        if most is not None:
            turn.messages = [self._cut(message, most, measures=limit is not None) for message in turn.messages]

    def _cut(self, message: Message, most: int, measures: bool) -> Message:
        content = message["content"]
        possible = (most + 1) * self._longest_token
        if not measures and len(content) <= possible:
            return message
        ids = self._tokenizer(content[:possible], add_special_tokens=False, verbose=False)["input_ids"]
        if len(ids) <= most and len(content) <= possible:
            return message
        kept = str(self._tokenizer.decode(ids[:most]))
        return message | {"content": f"{kept}... ({len(content) - len(kept)} more characters were cut off)"}


class _Hosts:
    """Hosts that serve one episode after the other."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._all: list[Host] = []
        self._busy: set[Host] = set()
        self._free: dict[type[Host], list[Host]] = defaultdict(list)

    @contextmanager
    def one(self, make: Make) -> Iterator[Host]:
        """Lend a host for the environments of `make`."""
        new = make_host(make, self._timeout_s)
        free = self._free[type(new)]
        if not free:
            self._all.append(new)
        host = free.pop() if free else new
        self._busy.add(host)
        yield host  # when this raises, the episode is not played to its end, and `close` ends its environment
        self._busy.remove(host)
        free.append(host)

    def close(self, waits: bool) -> None:
        """Close all hosts; a busy host closes after its call."""
        for host in self._all:
            if host in self._busy:
                host.abandon()
            else:
                host.close(waits=False)
        if waits:
            for host in self._all:
                host.close()


@functools.lru_cache(maxsize=8)
def _longest_token(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the length of the longest token in characters. Cached, because every step makes a player."""
    return max(map(len, tokenizer.get_vocab()))


@contextmanager
def _refusals() -> Iterator[None]:
    """Turn messages that the chat template refuses into a failure of the environment."""
    try:
        yield
    except DataError as error:
        raise EnvironmentFailed(f"the environment's messages cannot be shown to the policy: {error}"[:1000]) from error


def _shown(action: Action) -> Message:
    """Return the policy's turn as a message, for people."""
    message: Message = {"role": "assistant", "content": action.text}
    if action.calls:
        message["tool_calls"] = [_call(call) for call in action.calls]
    return message


def _call(call: ToolCall) -> dict[str, Any]:
    return {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)}
