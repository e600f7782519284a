"""No wait is silent: what is being done (`spans.running`) is shown while it takes long.

On a terminal it is one line that is redrawn, until a display has an area of its own; elsewhere a line every ten seconds at most.
"""

import os
import sys
import termios
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import IO, Any

from lockstep.observability.spans import Progress, progress, running
from lockstep.utils.terminal import printable

LOG_EVERY_S = 10.0
_NAMES = {
    "gen": "generating",
    "gen_max": "generating the greedy baseline",
    "reward": "scoring",
    "testing": "validating",
    "save_checkpoint": "saving",
    "data": "reading rows",
}
"""What stages of a step are called here, where their names do not say it."""


def describe(one: Progress, now: float | None = None) -> str:
    """Name, how much is done of how much, tokens, tokens a second, and for how long it has run."""
    seconds = (time.perf_counter() if now is None else now) - one.began
    parts = [_NAMES.get(one.name, one.name)]
    if one.total:
        parts.append(f"{one.done:,} of {one.total:,} {one.unit}".rstrip())
    elif one.done:
        parts.append(f"{one.done:,} {one.unit}".rstrip())
    if tokens := max(one.tokens, one.written):
        parts += [f"{tokens:,} tokens", f"{tokens / max(seconds, 1e-3):,.0f} tokens/s"]
    return "  ".join([*parts, f"{seconds:.0f} s"])


def now_running() -> str:
    """The innermost of what is being done; '' where nothing is."""
    stages = running[-1:]
    return describe(stages[0]) if stages else ""


class Lines:
    """Writes a line about what is being done whenever `LOG_EVERY_S` have gone by without a line. One for the process, on a thread."""

    def __init__(self) -> None:
        self._process = 0
        self._said_at = 0.0
        self._stream: IO[str] | None = None

    def start(self, stream: IO[str]) -> None:
        """Lines are wanted from now on, on that stream."""
        self._stream = stream
        self.heard()
        if self._process != os.getpid():  # a fork has no threads of its parent
            self._process = os.getpid()
            threading.Thread(target=self._run, name="waiting", daemon=True).start()

    @property
    def is_started(self) -> bool:
        """Whether lines are wanted."""
        return self._stream is not None

    def stop(self) -> None:
        """Lines are not wanted any more."""
        self._stream = None

    def heard(self) -> None:
        """The user has just been told something."""
        self._said_at = time.monotonic()

    def say(self) -> None:
        """Write the line, if it is time for one."""
        stream = self._stream
        if stream is not None and time.monotonic() - self._said_at >= LOG_EVERY_S and (text := now_running()):
            stream.write(f"  {printable(text)}\n")
            stream.flush()
            self.heard()

    def _run(self) -> None:
        while True:
            time.sleep(1.0)
            try:
                self.say()
            except (OSError, ValueError):  # the stream is closed
                self.stop()


LINES = Lines()
_area: Any = None
"""The redrawn line, while it is there."""
_streams = sys.stdout, sys.stderr
"""What it stands before."""


@contextmanager
def shown_waits(stream: IO[str], is_live: bool) -> Iterator[None]:
    """Inside, waits are shown on `stream`; on a terminal (`is_live`) until somebody calls `leave_terminal`, as a display does."""
    if not is_live:
        LINES.start(stream)
        try:
            yield
        finally:
            LINES.stop()
        return
    hook = sys.breakpointhook

    def on_breakpoint(*args: Any, **kwargs: Any) -> Any:
        leave_terminal()
        return hook(*args, **kwargs)

    sys.breakpointhook = on_breakpoint
    _take_terminal(stream)
    try:
        yield
    finally:
        leave_terminal()
        if sys.breakpointhook is on_breakpoint:
            sys.breakpointhook = hook


@contextmanager
def shown_work(name: str, total: int = 0, unit: str = "") -> Iterator[Progress]:
    """Show on stderr that `name` is being done: at once, then how far it is; for commands whose results go to stdout."""
    from lockstep.observability.display import is_live_terminal

    stream = sys.stderr
    with ExitStack() as stack:
        work = stack.enter_context(progress(name, total, unit))
        is_live = is_live_terminal(stream)
        if not is_live:
            stream.write(f"{printable(name)} ...\n")
            stream.flush()
        if _area is None and not LINES.is_started:
            stack.enter_context(shown_waits(stream, is_live))
        yield work


def _take_terminal(stream: IO[str]) -> None:
    global _area, _streams
    from rich.live import Live
    from rich.text import Text

    from lockstep.observability.safe_console import SafeConsole

    _streams = sys.stdout, sys.stderr
    console = SafeConsole(file=stream, force_terminal=True)
    _area = Live(get_renderable=lambda: Text(now_running(), no_wrap=True), console=console, refresh_per_second=4, transient=True)
    _area.start(refresh=True)


def leave_terminal() -> None:
    """End the redrawn line, for someone who needs the terminal. May be called again."""
    global _area
    area = _area
    _area = None
    if area is not None:
        area.stop()


def waiting_console() -> Any:
    """The console of the redrawn line, while it is there: what it prints stands above the line. None otherwise."""
    return None if _area is None else _area.console


def control_echo_off(stream: IO[str]) -> list[Any] | None:
    """Have the terminal neither echo Ctrl-C as ^C nor drop output that it has not shown yet: both would shift what is redrawn. Returns the
    settings before, for `restore_echo`.

    Does nothing where `stream` is no terminal, or that of other processes in the foreground.
    """
    try:
        descriptor = stream.fileno()
        if not os.isatty(descriptor) or os.tcgetpgrp(descriptor) != os.getpgrp():  # a process in the background would be stopped
            return None
        before = termios.tcgetattr(descriptor)
        changed = [*before]
        changed[3] = changed[3] & ~termios.ECHOCTL | termios.NOFLSH
        termios.tcsetattr(descriptor, termios.TCSANOW, changed)
        return before
    except (OSError, ValueError, termios.error):  # no descriptor, or no controlling terminal
        return None


def restore_echo(stream: IO[str], before: list[Any] | None) -> None:
    """Undo `control_echo_off`."""
    if before is not None:
        with suppress(OSError, ValueError, termios.error):
            if os.tcgetpgrp(stream.fileno()) == os.getpgrp():
                termios.tcsetattr(stream.fileno(), termios.TCSANOW, before)


def _leave_terminal_to_parent() -> None:
    # A child's prints must not draw the line, nor wait for a lock that the refreshing thread held at the fork.
    global _area
    if _area is not None:
        _area = None
        sys.stdout, sys.stderr = _streams


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_terminal_to_parent)
