"""How long the rest of a run will take."""

import time
from collections.abc import Callable, Mapping
from datetime import timedelta

Due = Mapping[str, Callable[[int], bool]]
"""What is done after some steps ("testing", "save_checkpoint", as in timing_s/) -> whether it is after this one."""

_RECENT_STEPS = 16
_FOREVER_S = 1e10


class Eta:
    """Learns from each step how long the next ones take: the mean of the last ones, and what is still due besides.

    The first step of a process is left out as soon as there is another: it compiles and fills caches.
    """

    def __init__(self, total_steps: int, first_step: int = 0, due: Due | None = None) -> None:
        self._total = total_steps
        self._done = first_step
        self._due = due or {}
        self._steps: list[float] = []
        """Seconds of each step of this process, all that is `due` left out."""
        self._besides: dict[str, float] = {}
        """Seconds that each of them took the last time."""
        self._left_out = 0.0
        """Seconds of what was done since the last step."""
        self._at = time.monotonic()

    def step(self, step: int, metrics: Mapping[str, float], is_step: bool = True) -> None:
        """The step (or, unless `is_step`, only something besides, before the first step) has just ended; reads timing_s/*."""
        besides = {name: float(metrics[f"timing_s/{name}"]) for name in self._due if f"timing_s/{name}" in metrics}
        self._besides |= besides
        self._left_out += sum(besides.values())
        if not is_step:
            return
        now = time.monotonic()
        self._steps = [*self._steps[:1], *self._steps[1:][1 - _RECENT_STEPS :], max(now - self._at - self._left_out, 0.0)]
        self._done = step
        self._at = now
        self._left_out = 0.0

    def seconds(self) -> float | None:
        """From now to the end; None before the first step is done."""
        if not self._steps:
            return None
        later = self._steps[1:] or self._steps
        ahead = range(self._done + 1, self._total + 1)
        besides = sum(seconds * sum(map(self._due[name], ahead)) for name, seconds in self._besides.items())
        return max(sum(later) / len(later) * len(ahead) + besides - (time.monotonic() - self._at), 0.0)

    def __str__(self) -> str:
        seconds = self.seconds()
        return str(timedelta(seconds=round(seconds))) if seconds is not None and seconds < _FOREVER_S else "-"
