"""`lockstep report RUN [RUN2 ...]`: one HTML file about a run, or several side by side, that opens without a network."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from lockstep.errors import LockstepError
from lockstep.utils.printable import say

_MAX_BYTES = 58_000_000
"""Of the data in a file: what a browser opens in two seconds."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the report that the command line asks for; returns the exit status."""
    parser = argparse.ArgumentParser("lockstep report", description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="the folder of a run, such as checkpoints/lockstep/ppo")
    parser.add_argument(
        "--out", type=Path, help="the file (default: report.html in the run's folder; of several runs, in this one)"
    )
    parser.add_argument("--samples", type=int, default=100_000, help="the most samples in it (default: %(default)s)")
    options = parser.parse_args(sys.argv[1:] if arguments is None else arguments)
    if options.samples < 0:
        parser.error(f"--samples {options.samples}: at least 0")
    out = options.out or (options.runs[0] / "report.html" if len(options.runs) == 1 else Path("report.html"))
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
    """Write the report of `runs` to the file `out`; returns a line that says what is in it. Raises DataError where a folder is no run's."""
    from lockstep.tools.report.assemble import assemble
    from lockstep.tools.report.collector import Collector, Limits

    limits = Limits(samples=max_samples)
    while True:
        collector = Collector(runs, limits)
        blocks = collector.collect()
        excess = sum(len(block.data) for block in blocks) * 4 / 3 / _MAX_BYTES  # base64
        if excess <= 1 or limits.characters < 1_000_000:
            break
        limits = limits.shrunk(0.9 / excess)  # texts that hardly compress
    draft = out.with_name(f".{out.name}.draft")
    with draft.open("w", encoding="utf-8") as file:
        file.writelines(assemble(blocks))
    os.replace(draft, out)
    shown, found, size = collector.num_samples, collector.num_found, out.stat().st_size / 1e6
    samples = f"{shown} samples" if shown == found else f"{shown} of {found} samples"
    problems = "".join(
        f"\nwarning: {run.name}: {' '.join(problem.split())}" for run in collector.runs for problem in run.problems()
    )
    return f"{out}: {len(runs)} {'run' if len(runs) == 1 else 'runs'}, {samples}, {size:.1f} MB; open it in a browser{problems}"
