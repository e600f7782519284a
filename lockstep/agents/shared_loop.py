"""The event loop that async environments share. One that an environment blocks gets no new environments until it goes on."""

import asyncio
import threading
import time
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any

_NAP_S = 0.25
_PATIENCE_S = 1.0
_MOMENT_S = 0.05


class SharedLoop:
    """An event loop on a thread of its own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._open: set[Future[Any]] = set()  # asyncio itself keeps no task alive that waits
        self._seen = time.monotonic()
        self._loop.call_soon(self._tick)
        threading.Thread(target=self._loop.run_forever, name="environments", daemon=True).start()

    def submit(self, coroutine: Coroutine[Any, Any, Any]) -> Future[Any]:
        """Run it. Coroutines begin in the order in which they are submitted."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        self._open.add(future)
        future.add_done_callback(self._open.discard)
        return future

    def is_blocked(self) -> bool:
        """Whether something keeps the loop from running what else is there."""
        if time.monotonic() - self._seen <= _PATIENCE_S:
            return False
        answered = threading.Event()  # it may be this thread that has kept the interpreter from it
        self._loop.call_soon_threadsafe(answered.set)
        return not answered.wait(_MOMENT_S)

    def _tick(self) -> None:
        self._seen = time.monotonic()
        self._loop.call_later(_NAP_S, self._tick)


_loops: list[SharedLoop] = []
"""The newest first."""
_lock = threading.Lock()


def shared_loop() -> SharedLoop:
    """One that is not blocked: a new one where all are."""
    with _lock:
        free = next((loop for loop in _loops if not loop.is_blocked()), None)
        if free is None:
            _loops.insert(0, free := SharedLoop())
        return free
