"""EpisodeLoop: many coroutines on one thread. They wait for the engine, for environments and for the tokenizer.

```text
await EngineCall(request)         -> (index, completion)   the engine's passes run between two rounds of coroutines
await host.stepping(action)  -> Turn                  environments run elsewhere (hosts.py)
await Encoding(template, text)  -> token ids             all texts of one round at once, on all processors
```

One thread, because the interpreter runs one at a time anyway: with a thread per episode, the passes would wait for all other threads after
each of the hundreds of kernels that they launch. Not asyncio, whose loop may already run in this thread.
"""

import queue
import time
from collections import defaultdict, deque
from collections.abc import Coroutine, Generator, Iterator
from typing import Any

from lockstep.agents.chat_template import TurnTemplate
from lockstep.agents.hosts import EnvironmentCall
from lockstep.workers.rollout.request import Completion, Request
from lockstep.workers.rollout.stream import Stream

Play = Coroutine[Any, Any, Any]
_AT_ONCE = 16
"""Coroutines that run between two passes: when a whole batch ends a turn at once, the device computes for the first of them while the
interpreter is busy with the next."""


_PATIENCE_S, _QUICK_S = 2e-3, 10e-3
"""How long to wait for environments that were just called, so that their turns are computed together; only while environments answer
within _QUICK_S."""


class EngineCall:
    """A request to the engine. Awaiting it gives its index in the stream and its completion."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.completion: Completion | None = None

    def __await__(self) -> Generator["EngineCall", None, tuple[int, Completion]]:
        yield self
        assert self.completion is not None
        return self.completion.index, self.completion


class Encoding:
    """A text to encode. Awaiting it gives its token ids."""

    def __init__(self, template: TurnTemplate, text: str) -> None:
        self.template = template
        self.text = text
        self.ids: list[int] = []

    def __await__(self) -> Generator["Encoding", None, list[int]]:
        yield self
        return self.ids


class EpisodeLoop:
    """Runs coroutines on a stream. Only this object calls the stream's `next`."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.idle_s = 0.0
        """How long the engine had no request."""
        self._idle_since = time.monotonic()
        self._engine_calls: dict[int, tuple[Play, EngineCall]] = {}
        self._environment_calls: dict[Play, EnvironmentCall] = {}
        self._answered: queue.SimpleQueue[tuple[Play, EnvironmentCall]] = queue.SimpleQueue()
        """Calls that have ended, late ones included. Other threads put them there."""
        self._just_called: set[Play] = set()
        """Coroutines in `_environment_calls` whose environments were called since the last pass."""
        self._is_quick = True
        """Whether the last environment that answered was quick."""
        self._texts: list[tuple[Play, Encoding]] = []
        self._completions: deque[Completion] = deque()
        self._running: set[Play] = set()

    def run(self, plays: Iterator[Play], at_once: int) -> None:
        """Run all coroutines, `at_once` at a time. Raise the error of a coroutine after closing the others."""
        try:
            while self._start(plays, at_once):
                self._take_completions()
                self._take_answers()
                self._encode()
                if len(self._engine_calls) > len(self._completions):
                    self._collect(self.stream.next(self.stream.poll_s))
        finally:
            for play in self._running:
                play.close()
            self._add_idle_time()

    def _start(self, plays: Iterator[Play], at_once: int) -> bool:
        """Start as many coroutines as may run; return whether any run."""
        while len(self._running) < at_once and (play := next(plays, None)) is not None:
            self._running.add(play)
            self._resume(play)
        return bool(self._running)

    def _resume(self, play: Play) -> None:
        """Run a coroutine until it waits for something, or to its end."""
        try:
            wanted = play.send(None)
        except BaseException as error:
            self._running.discard(play)
            if not isinstance(error, StopIteration):
                raise
            return
        if isinstance(wanted, EngineCall):
            self._add_idle_time()
            self._engine_calls[self.stream.add(wanted.request)] = play, wanted
        elif isinstance(wanted, Encoding):
            self._texts.append((play, wanted))
        else:
            assert isinstance(wanted, EnvironmentCall)
            self._environment_calls[play] = wanted
            self._just_called.add(play)
            wanted.future.add_done_callback(lambda _: self._answered.put((play, wanted)))

    def _add_idle_time(self) -> None:
        if not self._engine_calls:
            self.idle_s += time.monotonic() - self._idle_since
            self._idle_since = time.monotonic()

    def _collect(self, answer: object) -> None:
        """Collect the completions of a pass."""
        while answer is not None:
            if isinstance(answer, Completion):
                self._completions.append(answer)
            answer = self.stream.next(0.0) if self.stream.has_answers else None

    def _take_completions(self) -> None:
        """Resume the coroutines whose completions have come."""
        for _ in range(min(_AT_ONCE, len(self._completions))):
            completion = self._completions.popleft()
            play, call = self._engine_calls.pop(completion.index)
            if not self._engine_calls:
                self._idle_since = time.monotonic()
            call.completion = completion
            self._resume(play)

    def _take_answers(self) -> None:
        """Resume the coroutines whose environments have answered or are late. Wait for one of them if there is nothing else to do."""
        if self._environment_calls and not (self._engine_calls or self._texts):
            ends = [call.deadline for call in self._environment_calls.values() if call.deadline is not None]
            self._resume_answered(timeout_s=max(0.0, min(ends) - time.monotonic()) if ends else None)
        called = self._just_called
        patient_until = time.monotonic() + _PATIENCE_S
        self._just_called = set()
        for _ in range(_AT_ONCE):
            left = 0.0
            if self._is_quick and called & self._environment_calls.keys():
                left = max(0.0, patient_until - time.monotonic())
            if left <= 0.0 and self._answered.empty():
                break
            self._resume_answered(timeout_s=left)
        now = time.monotonic()
        late = [play for play, call in self._environment_calls.items() if call.deadline is not None and call.deadline < now]
        for play in late:
            del self._environment_calls[play]
            self._resume(play)

    def _resume_answered(self, timeout_s: float | None) -> None:
        try:
            play, call = self._answered.get(timeout=timeout_s)
        except queue.Empty:
            return
        self._is_quick = call.seconds < _QUICK_S
        if self._environment_calls.get(play) is call:  # else its deadline has passed and the episode was resumed
            del self._environment_calls[play]
            self._resume(play)

    def _encode(self) -> None:
        texts = self._texts
        self._texts = []
        groups: dict[int, list[Encoding]] = defaultdict(list)
        for _, encoding in texts:
            groups[id(encoding.template.tokenizer)].append(encoding)
        for group in groups.values():
            for encoding, ids in zip(group, group[0].template.encode([one.text for one in group]), strict=True):
                encoding.ids = ids
        for play, _ in texts:
            self._resume(play)
