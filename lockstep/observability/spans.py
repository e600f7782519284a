"""What is being done, how far it is, and how long each stage of a training step takes."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class Progress:
    """Something that takes time. Whoever does it counts; displays read it from threads of their own."""

    name: str
    began: float
    """On the clock of time.perf_counter."""
    total: int = 0
    """How much there is to do, in `unit`s such as "responses"; 0 where that is not known."""
    unit: str = ""
    done: int = 0
    tokens: int = 0
    written: int = 0
    """Tokens that this process has written, those of what is not done yet included; `tokens` are those of what is done."""


running: list[Progress] = []
"""What this process is doing, the innermost last."""


@contextmanager
def progress(name: str, total: int = 0, unit: str = "") -> Iterator[Progress]:
    """Inside, `name` is being done; what is yielded is counted by the caller."""
    one = Progress(name, time.perf_counter(), total, unit)
    running.append(one)
    try:
        yield one
    finally:
        running.remove(one)


def expect(total: int, unit: str) -> Progress:
    """The innermost of what is being done, which has `total` more to do, if it was not told of more already."""
    one = running[-1] if running else Progress("", 0.0)
    one.total = max(one.total, one.done + total)
    one.unit = unit
    return one


class StageTimer:
    """Wall time by stage name, for one training step at a time: what becomes timing_s/*."""

    def __init__(self, seconds: dict[str, float] | None = None) -> None:
        self.seconds: dict[str, float] = {} if seconds is None else seconds
        """Finished time by stage, in the order in which the stages first ended."""
        self._open: set[str] = set()

    @contextmanager
    def stage(self, name: str) -> Iterator[Progress]:
        """Add the time spent inside to `seconds[name]`, also when the body raises. It is among what is `running` meanwhile.

        Stages of different names may be nested; the outer one's time contains the inner one's. Raises RuntimeError when
        `name` is already open, since its time would be counted twice.
        """
        if name in self._open:
            raise RuntimeError(f"stage {name!r} is already open and would be counted twice: name the inner one differently")
        self._open.add(name)
        with progress(name) as one:
            try:
                yield one
            finally:
                self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - one.began
                self._open.remove(name)

    def reset(self) -> None:
        """Forget the finished times. A stage that is still open is counted from where it began."""
        self.seconds = {}
