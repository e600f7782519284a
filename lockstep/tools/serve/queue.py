"""The request queue, between the event loop and the engine's thread: requests go in, the engine's answers come back to their callers.

```text
event loop                                      the engine's thread
RequestQueue.admit -> QueuedCall: it counts
QueuedCall.submit -> Stream.add                 Stream.next, again and again: runs the passes
QueuedCall.next <- _deliver <- call_soon_threadsafe  <- Tokens, Completion, or why the engine broke
QueuedCall.close -> Stream.abort
RequestQueue.change -> QueuedCall.submit waits  when nothing is in flight: the change, then another stream
```
"""

from __future__ import annotations

import asyncio
import threading
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from lockstep.config.engine import ModelConfig
from lockstep.tools.load_model import LoadedModel, ModelSource, find_model
from lockstep.tools.serve.schema import EngineBroken, QueueFull, ShuttingDown
from lockstep.workers.rollout.base import ModuleRollout
from lockstep.workers.rollout.request import Tokens

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from lockstep.workers.rollout.request import Completion, Request
    from lockstep.workers.rollout.stream import Stream

_POLL_S = 0.5
"""How often the thread of an idle engine looks whether it should end."""


class QueuedCall:
    """The requests of one call, until each has its completion or the call is given up.

    `size` requests count in the queue from the start, also before they are submitted. Close it, however the call ends.
    """

    def __init__(self, queue: RequestQueue, size: int) -> None:
        self._queue = queue
        self.size = size
        """Requests, each of which gets one completion."""
        self.num_held = size
        """Requests that are not submitted yet."""
        self._answers: asyncio.Queue[tuple[int, Completion | Tokens] | EngineBroken] = asyncio.Queue()
        self.unfinished: dict[int, int] = {}
        """Index in the stream -> place in the call, of requests without a completion."""

    async def submit(self, requests: Sequence[Request]) -> None:
        """Give all requests to the engine; waits while it is changed. Raises EngineBroken."""
        await self._queue.submit(self, requests)

    async def next(self) -> tuple[int, Completion | Tokens]:
        """What came next, and the place in the call of the request that it answers. Raises EngineBroken."""
        answer = await self._answers.get()
        if isinstance(answer, EngineBroken):
            raise answer
        return answer

    def put(self, answer: Completion | Tokens | EngineBroken) -> None:
        """An answer to one of its requests, or the end of all answers."""
        if isinstance(answer, EngineBroken):
            self._answers.put_nowait(answer)
            return
        place = self.unfinished[answer.index] if isinstance(answer, Tokens) else self.unfinished.pop(answer.index)
        self._answers.put_nowait((place, answer))

    def close(self) -> None:
        """Give up what has no completion. May be called again."""
        self._queue.release(self)
        for index in self.unfinished:
            self._queue.stream.abort(index)


class RequestQueue:
    """The queued calls and the thread that computes them. Make it, and call all of it, on the event loop.

    At most `max_open` requests have no completion yet; `num_open` counts them, also those that were given up and have not left the
    engine. `error` says why the engine answers nothing any more.
    """

    def __init__(self, open_stream: Callable[[], Stream], max_open: int) -> None:
        self._open_stream = open_stream
        self.max_open = max_open
        self.stream = open_stream()
        self.error: EngineBroken | None = None
        self._calls: dict[int, QueuedCall] = {}
        """Index in the stream -> the call whose request it is."""
        self._undelivered: deque[Completion | Tokens] = deque()
        self._loop = asyncio.get_running_loop()
        self._is_closing = False
        self._is_open = asyncio.Event()
        """Unset while the engine is changed."""
        self._is_open.set()
        self._num_held = 0
        self._change: Callable[[], None] | None = None
        self._changed: asyncio.Future[None] | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @property
    def num_open(self) -> int:
        """Requests without a completion, also those that wait for their prompts to be read."""
        return len(self._calls) + self._num_held

    def admit(self, count: int) -> QueuedCall:
        """A place in the queue for so many requests. Raises QueueFull, EngineBroken."""
        if self.error is not None:
            raise self.error
        if self.num_open + count > self.max_open:
            raise QueueFull(f"{self.num_open} requests are running or waiting, {self.max_open} may; try again later")
        self._num_held += count
        return QueuedCall(self, count)

    async def submit(self, call: QueuedCall, requests: Sequence[Request]) -> None:
        """See QueuedCall.submit."""
        await self._is_open.wait()
        if self.error is not None:
            raise self.error
        self.release(call)
        for place, request in enumerate(requests):
            index = self.stream.add(request)  # its answers come by way of the event loop, so not before this function is left
            call.unfinished[index] = place
            self._calls[index] = call

    def release(self, call: QueuedCall) -> None:
        """The call's requests that are not submitted count no more."""
        self._num_held -= call.num_held
        call.num_held = 0

    async def change(self, function: Callable[[], None]) -> None:
        """Call `function` in the engine's thread when nothing is in flight; it may change weights. If it raises, the engine is broken.

        Raises EngineBroken.
        """
        if self.error is not None:
            raise self.error
        self._is_open.clear()
        self._changed = self._loop.create_future()
        self._change = function
        try:
            await self._changed
        finally:
            self._change = None
            self._is_open.set()

    async def close(self) -> None:
        """End the engine's thread and the stream; calls without an answer get ShuttingDown."""
        self._is_closing = True
        await asyncio.to_thread(self._thread.join)
        self.stream.close()
        self._break(ShuttingDown("the server is shutting down"))

    def give_up(self) -> None:
        """Answer all calls with ShuttingDown, and take no more; the engine ends their requests before its next pass."""
        for index in self._calls:
            self.stream.abort(index)
        self._break(ShuttingDown("the server is shutting down"))

    def _run(self) -> None:
        """The engine's thread."""
        try:
            while not self._is_closing:
                change = self._change
                if change is not None and not self._calls:  # all completions have been delivered
                    self._make_change(change)
                answer = self.stream.next(_POLL_S)
                if answer is not None:
                    self._undelivered.append(answer)
                    if len(self._undelivered) == 1:  # otherwise a delivery is on its way, and takes this one along
                        self._loop.call_soon_threadsafe(self._deliver)
        except BaseException as error:
            traceback.print_exc()
            broken = EngineBroken(f"the engine broke down: {type(error).__name__}: {error}")
            self._loop.call_soon_threadsafe(self._break, broken)

    def _make_change(self, function: Callable[[], None]) -> None:
        self._change = None
        self.stream.close()
        function()
        self.stream = self._open_stream()
        self._loop.call_soon_threadsafe(self._settle, None)

    def _settle(self, error: EngineBroken | None) -> None:
        """Tell the caller of `change`, if there is one, that the change was made, or will not be."""
        if self._changed is None or self._changed.done():
            return
        if error is None:
            self._changed.set_result(None)
        else:
            self._changed.set_exception(error)

    def _deliver(self) -> None:
        while self._undelivered:
            answer = self._undelivered[0]
            is_last = not isinstance(answer, Tokens)
            call = self._calls.pop(answer.index, None) if is_last else self._calls.get(answer.index)
            if call is not None:  # otherwise the engine broke, or the server ends
                call.put(answer)
            self._undelivered.popleft()

    def _break(self, error: EngineBroken) -> None:
        self.error = self.error or error
        for call in set(self._calls.values()):
            call.put(error)
        self._calls.clear()
        self._settle(error)
        self._is_open.set()


@dataclass(frozen=True)
class NewerWeights:
    """Weights that were read, and not yet used."""

    source: ModelSource
    module: PreTrainedModel
    engine: ModuleRollout

    @torch.no_grad()
    def put(self) -> None:
        """Give them to the engine, in place. Nothing may be in flight."""
        own = dict(self.engine.module.named_parameters())
        for name, parameter in self.module.named_parameters():
            own[name].copy_(parameter)
        self.engine.version += 1


def newer_weights(run: str, loaded: LoadedModel) -> NewerWeights | None:
    """The weights of the newest checkpoint in a run's folder, if it is a later step than the one that is served.

    Raises DataError or OSError when it cannot be read, also because the run has deleted it meanwhile.
    """
    from lockstep.generation import load_module

    source = find_model(run)
    if source.step is None or source.step <= (loaded.source.step or 0):
        return None
    engine = loaded.engine
    assert isinstance(engine, ModuleRollout), "the command refuses the others"
    return NewerWeights(source, load_module(ModelConfig(path=source.path), engine.attention), engine)
