"""Between the event loop and the engine: requests go in, what the engine answers comes back to who asked.

```text
event loop                                      the engine's thread
Desk.admit -> Order: counts in the queue
Order.submit -> Stream.add                      Stream.next, again and again: runs the passes
Order.next <- _deliver <- call_soon_threadsafe  <- Tokens, Completion, or why it broke
Order.close -> Stream.abort
Desk.change -> Order.submit waits               when nothing is in flight: the change, then another stream
```
"""

from __future__ import annotations

import asyncio
import threading
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from lockstep.workers.rollout.request import Tokens

if TYPE_CHECKING:
    from lockstep.workers.rollout.request import Completion, Request
    from lockstep.workers.rollout.stream import Stream

_LOOK_UP_S = 0.5
"""How often an idle engine's thread looks whether it should end."""


class EngineBroken(Exception):
    """The engine raised: it answers nothing any more."""


class ShuttingDown(EngineBroken):
    """The server ends."""


class QueueFull(Exception):
    """As many requests wait as may wait."""


class Order:
    """The requests of one call, until each has its completion or the call is given up.

    `size` requests count in the queue from the start, also before they are submitted. Close it, however the call ends.
    """

    def __init__(self, desk: Desk, size: int) -> None:
        self._desk = desk
        self.size = size
        """Requests, each of which gets one completion."""
        self.num_held = size
        """Requests that are not submitted yet."""
        self._answers: asyncio.Queue[tuple[int, Completion | Tokens] | EngineBroken] = asyncio.Queue()
        self.open: dict[int, int] = {}
        """Index in the stream -> place in the call, of requests without a completion."""

    async def submit(self, requests: Sequence[Request]) -> None:
        """Give all requests to the engine; waits while it is changed. Raises EngineBroken."""
        await self._desk.submit(self, requests)

    async def next(self) -> tuple[int, Completion | Tokens]:
        """What came next, and the place in the call of the request that it answers. Raises EngineBroken."""
        answer = await self._answers.get()
        if isinstance(answer, EngineBroken):
            raise answer
        return answer

    def close(self) -> None:
        """Give up what has no completion."""
        self._desk.release(self)
        for index in self.open:
            self._desk.stream.abort(index)

    def put(self, answer: Completion | Tokens | EngineBroken) -> None:
        """An answer to one of its requests, or the end of all answers."""
        if isinstance(answer, EngineBroken):
            self._answers.put_nowait(answer)
            return
        place = self.open[answer.index] if isinstance(answer, Tokens) else self.open.pop(answer.index)
        self._answers.put_nowait((place, answer))


class Desk:
    """Orders and the thread that computes them. Make it, and call all of it, on the event loop.

    At most `most_open` requests have no completion yet; `num_open` counts them, also those that were given up and have not left the
    engine. `broken` says why the engine answers nothing any more.
    """

    def __init__(self, open_stream: Callable[[], Stream], most_open: int) -> None:
        self._open_stream, self.most_open = open_stream, most_open
        self.stream = open_stream()
        self.broken: str | None = None
        self._orders: dict[int, Order] = {}
        self._came: deque[Completion | Tokens] = deque()
        self._loop = asyncio.get_running_loop()
        self._is_closing = False
        self._admits = asyncio.Event()
        self._admits.set()
        self._num_held = 0
        self._change: Callable[[], None] | None = None
        self._changed: asyncio.Future[None] | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @property
    def num_open(self) -> int:
        """Requests without a completion, also those that wait for their prompts to be read."""
        return len(self._orders) + self._num_held

    def admit(self, count: int) -> Order:
        """A place in the queue for so many requests. Raises QueueFull, EngineBroken."""
        if self.broken is not None:
            raise EngineBroken(self.broken)
        if self.num_open + count > self.most_open:
            raise QueueFull(f"{self.num_open} requests are running or waiting, {self.most_open} may; try again later")
        self._num_held += count
        return Order(self, count)

    async def submit(self, order: Order, requests: Sequence[Request]) -> None:
        """See Order.submit."""
        await self._admits.wait()
        if self.broken is not None:
            raise EngineBroken(self.broken)
        self.release(order)
        for place, request in enumerate(requests):
            index = self.stream.add(request)  # its answers come by way of the event loop, so not before this function is left
            order.open[index] = place
            self._orders[index] = order

    def release(self, order: Order) -> None:
        """The requests of the order that are not submitted count no more."""
        self._num_held -= order.num_held
        order.num_held = 0

    async def change(self, function: Callable[[], None]) -> None:
        """Call `function` in the engine's thread when nothing is in flight; it may change weights. If it raises, the engine is broken.

        Raises EngineBroken.
        """
        if self.broken is not None:
            raise EngineBroken(self.broken)
        self._admits.clear()
        self._change, self._changed = function, self._loop.create_future()
        try:
            await self._changed
        finally:
            self._change = None
            self._admits.set()

    async def close(self) -> None:
        """End the engine's thread and the stream; orders without an answer get EngineBroken."""
        self._is_closing = True
        await asyncio.to_thread(self._thread.join)
        self.stream.close()
        self._break(ShuttingDown("the server is shutting down"))

    def give_up(self, why: str) -> None:
        """Answer all orders with ShuttingDown, and take no more; the engine ends theirs before its next pass."""
        for index in self._orders:
            self.stream.abort(index)
        self._break(ShuttingDown(why))

    def _run(self) -> None:
        """The engine's thread."""
        try:
            while not self._is_closing:
                change = self._change
                if change is not None and not self._orders:  # all completions have been delivered
                    self._make_change(change)
                answer = self.stream.next(_LOOK_UP_S)
                if answer is not None:
                    self._came.append(answer)
                    if len(self._came) == 1:  # otherwise a delivery is on its way, and takes this one along
                        self._loop.call_soon_threadsafe(self._deliver)
        except BaseException as error:
            traceback.print_exc()
            why = f"the engine broke down: {type(error).__name__}: {error}"
            self._loop.call_soon_threadsafe(self._break, EngineBroken(why))

    def _make_change(self, function: Callable[[], None]) -> None:
        self._change = None
        self.stream.close()
        function()
        self.stream = self._open_stream()
        self._loop.call_soon_threadsafe(self._settle, None)

    def _settle(self, error: EngineBroken | None) -> None:
        """Tell who waits for a change, if anybody does, that it was made, or will not be."""
        if self._changed is None or self._changed.done():
            return
        if error is None:
            self._changed.set_result(None)
        else:
            self._changed.set_exception(error)

    def _deliver(self) -> None:
        while self._came:
            answer = self._came[0]
            order = self._orders.get(answer.index) if isinstance(answer, Tokens) else self._orders.pop(answer.index, None)
            if order is not None:  # else it was given up
                order.put(answer)
            self._came.popleft()

    def _break(self, error: EngineBroken) -> None:
        self.broken = self.broken or str(error)
        for order in {id(order): order for order in self._orders.values()}.values():
            order.put(error)
        self._orders.clear()
        self._settle(error)
        self._admits.set()
