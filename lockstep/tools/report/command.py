"""`lockstep report RUN [RUN2 ...]`: one HTML file about a run, or several side by side, that opens without a network."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.errors import LockstepError
from lockstep.utils.terminal import say

if TYPE_CHECKING:
    from lockstep.tools.report.collector import Collector

_MAX_BYTES = 58_000_000
"""The most data in a file: what a browser opens in two seconds."""
_MIN_CHARACTERS = 1_000_000
"""Characters of prompts and responses below which a page is not thinned further."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the report that the command line asks for; return the exit status."""
    parser = argparse.ArgumentParser("lockstep report", description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="the folder of a run, such as checkpoints/lockstep/ppo")
    parser.add_argument(
        "--out", type=Path, help="the file (default: report.html in the run's folder; of several runs, in this one)"
    )
    parser.add_argument("--samples", type=int, default=100_000, help="the most samples in it (default: %(default)s)")
    options = parser.parse_args(sys.argv[1:] if arguments is None else arguments)
    if options.samples < 0:
        parser.error(f"--samples {options.samples}: at least 0")
    default_folder = options.runs[0] if len(options.runs) == 1 else Path()
    out = options.out or default_folder / "report.html"
    try:
        say(write_report(options.runs, out, options.samples))
    except LockstepError as error:
        say(f"error: {error}", is_error=True)
        return 1
    except OSError as error:
        say(f"error: {out} cannot be written: {error}; name another file with --out", is_error=True)
        return 1
    return 0


def write_report(runs: Sequence[Path], out: Path, max_samples: int = 100_000) -> str:
    """Write the report of `runs` to the file `out`; return a line that says what is in it.

    Raises DataError if a folder is not the folder of a run.
    """
    from lockstep.tools.report.collector import Collector, PageLimits
    from lockstep.tools.report.html import assemble

    limits = PageLimits(samples=max_samples)
    while True:
        collector = Collector(runs, limits)
        blocks = collector.collect()
        num_bytes = sum(len(block.data) for block in blocks) * 4 / 3  # base64
        excess = num_bytes / _MAX_BYTES
        if excess <= 1 or limits.characters < _MIN_CHARACTERS:
            break
        limits = limits.shrunk(0.9 / excess)  # texts that hardly compress
    draft = out.with_name(f".{out.name}.draft")
    with draft.open("w", encoding="utf-8") as file:
        file.writelines(assemble(blocks))
    os.replace(draft, out)
    return _summary(collector, out)


def _summary(collector: Collector, out: Path) -> str:
    shown = collector.num_samples
    found = collector.num_found
    samples = f"{shown} samples" if shown == found else f"{shown} of {found} samples"
    runs = "1 run" if len(collector.runs) == 1 else f"{len(collector.runs)} runs"
    size = out.stat().st_size / 1e6
    lines = [f"{out}: {runs}, {samples}, {size:.1f} MB; open it in a browser"]
    for run in collector.runs:
        for problem in run.problems():
            lines.append(f"warning: {run.name}: {' '.join(problem.split())}")
    return "\n".join(lines)
