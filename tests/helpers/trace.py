"""What one step of training goes through: frames, files, and changes of how rows lie."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import lockstep

PACKAGE = str(Path(lockstep.__file__).parent) + "/"
STEP = "RayPPOTrainer._step"
FORMULA = "clipped_surrogate"
PADS = ("Ragged.pad", "Rows.pad")
UNPADS = ("Ragged.from_padded", "Rows.unpad")
PACKING = PACKAGE + "models/packing.py"


class StepTrace:
    """What was called inside one `_step`, on every thread of this process."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        """Calls of our own functions, by qualified name."""
        self.files: set[str] = set()
        """Our own files of which a function ran."""
        self.path: list[str] = []
        """Our own frames from `fit` to the formula, where they were most."""
        self.packs = 0
        """Calls of a function of models/packing.py named pack..., from outside that file."""

    @property
    def pads(self) -> int:
        """How often a column was made a padded block."""
        return sum(self.calls[name] for name in PADS)

    @property
    def unpads(self) -> int:
        """How often a padded block was made a column."""
        return sum(self.calls[name] for name in UNPADS)

    def report(self) -> str:
        """The numbers, and the path to the formula."""
        return "\n".join(
            [
                f"{len(self.path)} frames from fit to the formula, {self.pads} pads, {self.unpads} unpads, {self.packs} packs",
                *(f"  {n:2} {frame}" for n, frame in enumerate(self.path, 1)),
                *(f"  {file.removeprefix(PACKAGE)}" for file in sorted(self.files)),
            ]
        )

    def note(self, frame: FrameType) -> None:
        """Take in a call."""
        code = frame.f_code
        self.calls[code.co_qualname] += 1
        self.files.add(code.co_filename)
        caller = frame.f_back
        if code.co_filename == PACKING and code.co_name.startswith("pack") and caller and caller.f_code.co_filename != PACKING:
            self.packs += 1
        if code.co_name == FORMULA:
            self.path = max(self.path, _own_frames(frame), key=len)


def _own_frames(frame: FrameType | None) -> list[str]:
    """Our own frames from the outermost `fit` to this one."""
    frames: list[str] = []
    while frame is not None:
        code = frame.f_code
        if code.co_filename.startswith(PACKAGE):
            frames.append(f"{code.co_filename.removeprefix(PACKAGE)}:{frame.f_lineno} {code.co_qualname}")
        frame = frame.f_back
    frames.reverse()
    start = next((n for n, name in enumerate(frames) if name.endswith(".fit")), 0)
    return frames[start:]


@contextmanager
def trace() -> Iterator[list[StepTrace]]:
    """Record every step that begins meanwhile. A coroutine or generator counts each time that it goes on."""
    steps: list[StepTrace] = []
    inside = False

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal inside
        code = frame.f_code
        if event not in ("call", "return") or not code.co_filename.startswith(PACKAGE):
            return
        if code.co_qualname == STEP:
            inside = event == "call"
            if inside:
                steps.append(StepTrace())
        if event == "call" and inside and code.co_name != "<module>":  # an import runs a file, but is no part of a step
            steps[-1].note(frame)

    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        yield steps
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
