"""What the user sees while a run goes on: a live view on a terminal, one line per step everywhere else.

```text
step 12/60  reward 0.412  ref kl 0.0012  entropy 1.23  length 7.4  4.1 s  ETA 0:03:18  (gen 1.2 update_critic 0.9 update_actor 1.3)
  generating  37 of 64 responses  4,210 tokens  890 tokens/s  21 s
validation at step 10: val-core/x/acc/mean@1 0.731 [0.689, 0.770]
```
"""

import math
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from types import FrameType
from typing import Any, Self, TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Column, Table
from rich.text import Text

from lockstep.observability.eta import Due, Eta
from lockstep.observability.safe_console import SafeConsole
from lockstep.observability.waiting import (
    LINES,
    control_echo_off,
    leave_terminal,
    now_running,
    restore_echo,
    shown_waits,
    waiting_console,
)
from lockstep.utils.terminal import printable


@dataclass(frozen=True)
class View:
    """Which metrics of a step are shown."""

    columns: tuple[tuple[str, str, tuple[str, ...]], ...]
    """(label, number format, metrics of which the first present one is shown); the last are the seconds. One without any is left out."""
    curve: tuple[str, str]
    """The label and the metric whose course is drawn."""
    validation: tuple[str, ...] = ("val-core/",)
    """How the names of validation results begin."""
    hides_zero: tuple[str, ...] = ()
    """Labels of columns that say nothing where they show 0."""


PPO_VIEW = View(
    (
        ("reward", ".3f", ("critic/score/mean",)),
        ("ref kl", ".4f", ("actor/reward_kl_penalty", "actor/kl_loss")),
        ("policy kl", ".4f", ("actor/ppo_kl",)),
        ("entropy", ".2f", ("actor/entropy",)),
        ("length", ".1f", ("response_length/mean",)),
        *((name, ".1f", (f"agent/{name}",)) for name in ("turns", "calls", "faults", "environment_s", "wait_s")),
        ("missing", ".0f", ("reward/missing", "agent/missing")),
        ("seconds", ".1f", ("timing_s/step",)),
    ),
    curve=("reward", "critic/score/mean"),
    # A batch that is one update has no other policy to be far from, and before the first update the policy is its reference.
    # Of episodes, what they have none of.
    hides_zero=("ref kl", "policy kl", "calls", "faults", "missing"),
)

_RECENT_STEPS = 8
_SPARKLINE_WIDTH = 50
_BARS = "▁▂▃▄▅▆▇█"
_ASCII_BARS = "_.-=+*#@"


class Display:
    """The view of one run; this one shows nothing.

    A missing metric is left out; no number, not even nan, makes it raise; `with` closes it.
    """

    def start(self, total_steps: int, first_step: int = 0, title: str = "", due: Due | None = None) -> None:
        """Begin; `first_step` steps are already done (0 unless the run was resumed). `due` is what is done besides, for the ETA."""

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Step number `step` (from 1) is done. Some of the metrics, as the view says, are shown as validation results."""

    def message(self, text: str) -> None:
        """Show a text that stays."""

    def close(self) -> None:
        """End and leave the terminal in order; a second call does nothing. `start` begins anew."""

    def waits(self) -> AbstractContextManager[None]:
        """Inside, what takes long is shown where the display shows it, until it begins (again)."""
        return nullcontext()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def make_display(stream: TextIO | None = None, view: View = PPO_VIEW) -> Display:
    """A live view when `stream` (default: standard output) is a terminal that no debugger needs, else plain lines."""
    stream = sys.stdout if stream is None else stream
    if is_live_terminal(stream):
        return LiveDisplay(SafeConsole(file=stream, force_terminal=True), view)
    LINES.start(stream)
    return PlainDisplay(stream, view)


def is_live_terminal(stream: TextIO) -> bool:
    """Whether it is a terminal that can be redrawn and that no debugger needs."""
    is_capable = stream.isatty() and os.environ.get("TERM", "").lower() not in ("dumb", "unknown")
    return is_capable and not _is_under_debugger()


class PlainDisplay(Display):
    """One line per step, which has the time of every stage; flushed, without control codes: for files, pipes and debuggers."""

    def __init__(self, stream: TextIO, view: View = PPO_VIEW) -> None:
        self._stream = stream
        self._view = view
        self._total_steps = 0
        self._eta = Eta(0)

    def start(self, total_steps: int, first_step: int = 0, title: str = "", due: Due | None = None) -> None:
        LINES.start(self._stream)
        self._total_steps = total_steps
        self._eta = Eta(total_steps, first_step, due)
        if title:
            self.message(title)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._eta.step(step, metrics, is_step=_has_step(metrics, self._view))
        for line in _lines(step, self._total_steps, metrics, self._view, self._eta):
            self.message(line)

    def message(self, text: str) -> None:
        self._stream.write(f"{printable(text)}\n")
        self._stream.flush()
        LINES.heard()

    def close(self) -> None:
        self._stream.flush()
        LINES.stop()

    def waits(self) -> AbstractContextManager[None]:
        return shown_waits(self._stream, is_live=False)


class LiveDisplay(Display):
    """Progress, the running stage, the last steps, time per stage and the reward so far, redrawn four times a second.

    Prints of the process appear above the live area. `breakpoint()` hands the terminal to the debugger; the live area
    returns with the next step once nothing is traced any more, and until then steps are plain lines.
    """

    def __init__(self, console: Console, view: View = PPO_VIEW) -> None:
        self._console = console
        self._view = view
        self._reset(total_steps=0, first_step=0, title="", due=None)
        self._is_open = False
        self._echo: list[Any] | None = None
        """The settings of the terminal before the live area."""
        self._live = self._new_live()
        self._streams = sys.stdout, sys.stderr
        self._breakpointhook = sys.breakpointhook
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._leave_terminal_to_parent)

    def _reset(self, total_steps: int, first_step: int, title: str, due: Due | None) -> None:
        self._title = title
        self._total_steps = total_steps
        self._done = first_step
        self._eta = Eta(total_steps, first_step, due)
        self._recent: list[tuple[int, dict[str, str]]] = []
        self._curve: list[float] = []
        self._stage_times = ""

    def start(self, total_steps: int, first_step: int = 0, title: str = "", due: Due | None = None) -> None:
        self._reset(total_steps, first_step, title, due)
        if not self._is_open:
            leave_terminal()
            self._is_open = True
            self._breakpointhook = sys.breakpointhook
            sys.breakpointhook = self._on_breakpoint
            self._show()

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._return_from_debugger()
        has_step = _has_step(metrics, self._view)
        self._eta.step(step, metrics, is_step=has_step)
        # Lists are replaced or appended to, never cut: the refresh thread may be reading them.
        if has_step:
            self._done = step
            self._recent = [*self._recent[1 - _RECENT_STEPS :], (step, _cells(metrics, self._view))]
            self._curve.append(float(metrics.get(self._view.curve[1], math.nan)))
            self._stage_times = _stage_times(metrics)
        is_live = self._live.is_started
        for line in (
            _validation_lines(step, metrics, self._view)
            if is_live
            else _lines(step, self._total_steps, metrics, self._view, self._eta)
        ):
            self.message(line)
        if is_live:
            self._live.refresh()

    def message(self, text: str) -> None:
        # Before `start` the line of `waits` may be on the screen: only its own console prints above it.
        console = waiting_console() or self._console
        console.print(Text(text), soft_wrap=True)

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            sys.breakpointhook = self._breakpointhook
            self._hide()

    def waits(self) -> AbstractContextManager[None]:
        return shown_waits(self._console.file, is_live=True)

    # -- sharing the terminal ------------------------------------------------------------------------------------------

    def _show(self) -> None:
        self._streams = sys.stdout, sys.stderr
        self._live = self._new_live()  # one that was shown before would first erase as many lines as it had drawn
        self._echo = control_echo_off(self._console.file)
        self._live.start(refresh=True)

    def _hide(self) -> None:
        self._live.stop()
        restore_echo(self._console.file, self._echo)
        self._echo = None

    def _new_live(self) -> Live:
        return Live(get_renderable=self._render, console=self._console, refresh_per_second=4)

    def _on_breakpoint(self, *args: Any, **kwargs: Any) -> Any:
        self._hide()
        return self._breakpointhook(*args, **kwargs)

    def _return_from_debugger(self) -> None:
        if self._is_open and not self._live.is_started and not _is_under_debugger():
            self._show()

    def _leave_terminal_to_parent(self) -> None:
        # The child's prints must not draw the live area, nor wait for a lock that the refresh thread held at the fork.
        if self._is_open:
            sys.stdout, sys.stderr = self._streams
            sys.breakpointhook = self._breakpointhook

    # -- drawing -------------------------------------------------------------------------------------------------------

    def _render(self) -> RenderableType:
        parts: list[RenderableType] = [Text(self._title)] if self._title else []
        parts.append(self._progress())
        if self._is_open and (text := now_running()):
            parts.append(Text(text))
        if self._recent:
            parts.append(_recent_table(self._recent, self._view))
        if self._stage_times:
            parts.append(Text(f"seconds  {self._stage_times}"))
        bars = _ASCII_BARS if self._console.options.ascii_only else _BARS
        if curve := sparkline(self._curve, _SPARKLINE_WIDTH, bars):
            parts.append(Text(f"{self._view.curve[0]}  {curve}", no_wrap=True))
        return Group(*parts)

    def _progress(self) -> Table:
        row = Table.grid(padding=(0, 2))
        bar = ProgressBar(total=max(self._total_steps, 1), completed=self._done, width=40)
        row.add_row(bar, Text(f"{self._done}/{self._total_steps} steps"), Text(f"ETA {self._eta}"))
        return row


def sparkline(numbers: Sequence[float], width: int, bars: str = _BARS) -> str:
    """The numbers as a row of at most `width` bars from lowest to highest, then that range; '' when none is finite.

    More numbers than that are averaged in neighbouring groups. One that is not finite is left out; a group without a
    finite one is blank.
    """
    columns = min(len(numbers), width)
    edges = [len(numbers) * i // columns for i in range(columns + 1)] if columns else [0]
    groups = [_finite_mean(numbers[a:b]) for a, b in pairwise(edges)]
    shown = [x for x in groups if x is not None]
    if not shown:
        return ""
    low = min(shown)
    high = max(shown)
    # A flat curve is drawn at the bottom.
    levels = [None if x is None else (x - low) / (high - low) if high > low else 0.0 for x in groups]
    line = "".join(" " if level is None else bars[round(level * (len(bars) - 1))] for level in levels)
    return f"{line}  {_number(low, '.3f')} to {_number(high, '.3f')}"


def _finite_mean(numbers: Sequence[float]) -> float | None:
    # Clamped so that neither the sum nor the range of the curve can overflow.
    finite = [min(max(x, -1e300), 1e300) for x in numbers if math.isfinite(x)]
    return sum(finite) / len(finite) if finite else None


def _recent_table(rows: Sequence[tuple[int, dict[str, str]]], view: View) -> Table:
    labels = [label for label, _, _ in view.columns if any(label in cells for _, cells in rows)]
    table = Table(*(Column(label, justify="right") for label in ("step", *labels)), box=None, pad_edge=False)
    for step, cells in rows:
        table.add_row(str(step), *(cells.get(label, "-") for label in labels))
    return table


def _lines(step: int, total_steps: int, metrics: Mapping[str, float], view: View, eta: Eta) -> list[str]:
    """The step in one line, then its validation results."""
    cells = _cells(metrics, view)
    seconds = cells.pop(view.columns[-1][0], None)
    parts = [f"step {step}/{total_steps}", *(f"{label} {cell}" for label, cell in cells.items())]
    parts += [f"{seconds} s"] if seconds is not None else []
    parts += [f"ETA {eta}"] if step < total_steps else []
    stages = _stage_times(metrics)
    line = "  ".join([*parts, f"({stages})"] if stages else parts)
    return [*([line] if _has_step(metrics, view) else []), *_validation_lines(step, metrics, view)]


def _validation_lines(step: int, metrics: Mapping[str, float], view: View) -> list[str]:
    return [
        f"validation at step {step}: {name} {with_interval(metrics, name, '.3f')}"
        for name in shown_numbers(metrics, view.validation)
    ]


def shown_numbers(metrics: Mapping[str, float], starts: tuple[str, ...]) -> list[str]:
    """Names of the validation results that begin with one of `starts`, without the ends of intervals."""
    names = [name for name in metrics if name.startswith(starts)]
    ends = {end for name in names for end in _interval_names(name)}
    return [name for name in names if name not in ends]


def with_interval(metrics: Mapping[str, float], name: str, spec: str) -> str:
    """The number, with its 95 % interval where it has one."""
    ends = _interval_names(name)
    interval = f" [{', '.join(_number(metrics[end], spec) for end in ends)}]" if all(end in metrics for end in ends) else ""
    return _number(metrics[name], spec) + interval


def _interval_names(name: str) -> tuple[str, str]:
    """Where the ends of a number's interval are: `val-core/NAME` has them in `val-aux/NAME/low` and `/high`, `val/NAME` in `val/NAME_low`
    and `val/NAME_high`; `val/NAME/SOURCE` in `val/NAME_low/SOURCE` and so on."""
    head, _, rest = name.partition("/")
    if head == "val":
        number, slash, source = rest.partition("/")
        return f"val/{number}_low{slash}{source}", f"val/{number}_high{slash}{source}"
    base = name.replace("val-core/", "val-aux/", 1)
    return f"{base}/low", f"{base}/high"


def _has_step(metrics: Mapping[str, float], view: View) -> bool:
    """False for the metrics of a validation alone, such as the one before the first step."""
    return not _validation_lines(0, metrics, view) or bool(_cells(metrics, view))


def _cells(metrics: Mapping[str, float], view: View) -> dict[str, str]:
    """Label -> number, of the columns that have one."""
    found = {
        label: _number(metrics[name], spec)
        for label, spec, names in view.columns
        for name in [name for name in names if name in metrics][:1]
    }
    return {label: cell for label, cell in found.items() if label not in view.hides_zero or float(cell) != 0}


def _stage_times(metrics: Mapping[str, float]) -> str:
    """Seconds a stage, in the order of the mapping, which is the order in which they ran."""
    prefix = "timing_s/"
    return " ".join(
        f"{name.removeprefix(prefix)} {_number(value, '.1f')}"
        for name, value in metrics.items()
        if name.startswith(prefix) and name != "timing_s/step"
    )


def _number(value: float, spec: str) -> str:
    if 1e6 <= abs(value) < math.inf:
        return f"{value:.2e}"
    return f"{value:z{spec}}"


def _is_under_debugger() -> bool:
    # A debugger that has no breakpoints yet, or uses Python's monitoring interface, sets no trace function.
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_globals.get("__name__") == "bdb":
            return True
        frame = frame.f_back
    monitoring = getattr(sys, "monitoring", None)
    return sys.gettrace() is not None or bool(monitoring and monitoring.get_tool(monitoring.DEBUGGER_ID))
