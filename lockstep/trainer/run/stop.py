"""SIGTERM and SIGINT (Ctrl-C) end a run after its step, with a checkpoint, within a deadline."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any

from lockstep.errors import Stopped

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopSignals:
    """Inside, the first signal sets `asked`. A second one, or `deadline_s` seconds after the first, raises Stopped in the main thread.

    `ended` turns the reason into the message for the user. `acknowledge` is called once, with the first signal, from a thread: at once,
    also while the main thread computes and runs no handler. Outside the main thread, which alone gets signals, this does nothing.
    """

    def __init__(self, deadline_s: float, ended: Callable[[str], str], acknowledge: Callable[[signal.Signals], None]) -> None:
        self._deadline_s = deadline_s
        self._ended = ended
        self._acknowledge = acknowledge
        self._before: dict[signal.Signals, Any] = {}
        self._pipe: tuple[int, int] | None = None
        """Python writes the number of each signal into the second end."""
        self._fd_before = -1
        self._thread: threading.Thread | None = None
        self.asked: signal.Signals | None = None
        """The first signal."""

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            self._pipe = os.pipe()
            os.set_blocking(self._pipe[1], False)
            self._fd_before = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
            self._thread = threading.Thread(target=self._listen, args=(self._pipe[0],), name="signals", daemon=True)
            self._thread.start()
            self._before = {number: signal.signal(number, self._handle) for number in (*_SIGNALS, signal.SIGALRM)}
        return self

    def __exit__(self, *error: object) -> None:
        if self._before:
            signal.setitimer(signal.ITIMER_REAL, 0)
            self._stop_listening()
        for number, handler in self._before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        self._before = {}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number != signal.SIGALRM and self.asked is None:
            self.asked = signal.Signals(number)
            signal.setitimer(signal.ITIMER_REAL, self._deadline_s)
        else:
            assert self.asked is not None
            why = "a second signal" if number != signal.SIGALRM else f"{self._deadline_s:g} s (trainer.stop_deadline_s) were over"
            raise Stopped(self.asked, self._ended(f"{self.asked.name}: {why} before this step was saved"))

    def _listen(self, pipe: int) -> None:
        """Acknowledge the first signal; a byte 0 ends this."""
        is_told = False
        while number := os.read(pipe, 1)[0]:
            if number in _SIGNALS and not is_told:
                is_told = True
                with suppress(OSError, ValueError):  # the terminal is gone
                    self._acknowledge(signal.Signals(number))

    def _stop_listening(self) -> None:
        assert self._pipe is not None
        assert self._thread is not None
        signal.set_wakeup_fd(self._fd_before)
        os.write(self._pipe[1], b"\0")
        self._thread.join()
        for end in self._pipe:
            os.close(end)


def _leave_signals_to_parent() -> None:
    """Keep a forked child that gets a signal from writing into its parent's pipe."""
    if threading.current_thread() is threading.main_thread():
        signal.set_wakeup_fd(-1)


os.register_at_fork(after_in_child=_leave_signals_to_parent)


def end_on_sigterm() -> None:
    """Make SIGTERM raise Stopped, as SIGINT raises KeyboardInterrupt, before the first step: there is nothing to save.

    Call it after `ray.init`, whose own handler ends the process at once.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _raise)


def _raise(number: int, frame: FrameType | None) -> None:
    text = "SIGTERM: ended while no step was being done; the same command goes on from the newest checkpoint, where there is one"
    raise Stopped(signal.Signals(number), text)
