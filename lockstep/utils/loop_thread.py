"""An asyncio event loop on a thread of its own, which shows when a coroutine blocks it."""

import asyncio
import threading
import time
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any


class LoopThread:
    """Runs coroutines that other threads submit, on one event loop in a daemon thread called `name`. The loop beats every `beat_s`."""

    def __init__(self, name: str, beat_s: float) -> None:
        self._beat_s = beat_s
        self._loop = asyncio.new_event_loop()
        self._last_beat = time.monotonic()
        self._open: set[Future[Any]] = set()  # asyncio keeps only weak references to its tasks; a future keeps its task
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def submit(self, coroutine: Coroutine[Any, Any, Any]) -> Future[Any]:
        """Start a coroutine and return its future. Coroutines start in the order in which they are submitted."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        self._open.add(future)
        future.add_done_callback(self._open.discard)
        return future

    @property
    def silent_s(self) -> float:
        """Seconds since the last beat. If it is much more than a beat, a coroutine blocks the loop."""
        return time.monotonic() - self._last_beat

    @property
    def is_closed(self) -> bool:
        """Whether `stop` has ended the loop."""
        return self._loop.is_closed()

    def answers(self, within_s: float) -> bool:
        """Return whether the loop runs a callback within this time."""
        answered = threading.Event()
        self._loop.call_soon_threadsafe(answered.set)
        return answered.wait(within_s)

    def stop(self) -> None:
        """End the loop and its thread. Called in the loop, when its coroutines have ended."""
        self._loop.stop()

    def _run(self) -> None:
        self._loop.call_soon(self._beat)
        self._loop.run_forever()
        self._loop.close()

    def _beat(self) -> None:
        self._last_beat = time.monotonic()
        self._loop.call_later(self._beat_s, self._beat)
