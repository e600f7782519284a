"""Random generations on a device, each compared with the plain engine: the native engine on the CPU, in PyTorch alone.

    python -m tests.gpu.soak --count 2000 --processes 14 --minutes 5

Lists of requests, and streams whose requests come while others run, continue each other and are aborted (gpu/soak_cases.py). Prints a table
and the cases that differ; ends with status 1 if there is one, or if the time was up before the first case. Models are tiny and float32, so
tokens are equal but where a random number falls within rounding of the border between two tokens; such a response is compared up to there
and counted as `border`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import os
import statistics
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parents[1]))

from gpu.soak_cases import FAMILIES_DRAWN, draw_case
from gpu.soak_play import compare, engine_for, expected, plain_for, play

_IMPORTED_ONCE = [
    "lockstep.generation.engine",
    *(f"transformers.models.{family}.modeling_{family}" for family in FAMILIES_DRAWN),
]
"""By the process that all others are forks of: what takes seconds."""
_QUIET = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
"""For processes that share the cores."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What came of one case."""

    seed: int
    kind: str
    verdicts: Counter[str]
    """equal, border, wrong -> responses"""
    error: str | None = None
    """What it raised."""
    seconds: float = dataclasses.field(default=0.0, compare=False)
    """How long it took on the device, without the plain engine."""

    @property
    def is_wrong(self) -> bool:
        return self.error is not None or self.verdicts["wrong"] > 0


def try_case(seed: int, device: str, end: float) -> Outcome | None:
    """The case of this number; None when the time is up (`end` on time.monotonic, which is one clock for all processes)."""
    if time.monotonic() > end:
        return None
    case, start = draw_case(seed), time.monotonic()
    try:
        plain = plain_for(case)
        played = play(engine_for(case, device), case)
        seconds = time.monotonic() - start
        return Outcome(seed, case.kind, compare(case, played, expected(plain, case, played), plain), None, seconds)
    except Exception:  # whatever it is, the other cases are tried
        return Outcome(seed, case.kind, Counter(), traceback.format_exc())


def soak(
    seeds: Iterable[int],
    seconds: float,
    device: str,
    processes: int = 1,
    tell: Callable[[list[Outcome]], None] = lambda found: None,
) -> list[Outcome]:
    """What came of the cases of these numbers, or of as many as fit into the time; `tell` gets what there is after each."""
    one, outcomes = partial(try_case, device=device, end=time.monotonic() + seconds), list[Outcome]()
    for outcome in map(one, seeds) if processes == 1 else _in_processes(one, seeds, processes):
        if outcome is not None:
            outcomes.append(outcome)
            tell(outcomes)
    return sorted(outcomes, key=lambda outcome: outcome.seed)


def _in_processes(one: Callable[[int], Outcome | None], seeds: Iterable[int], processes: int) -> Iterator[Outcome | None]:
    """What comes of the cases, as they end."""
    os.environ.update(_QUIET)
    by_family: dict[str, list[int]] = {}
    for seed in seeds:
        by_family.setdefault(draw_case(seed).family, []).append(seed)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_IMPORTED_ONCE)
    with ExitStack() as stack:
        futures: list[Future[Outcome | None]] = []
        for count, family in zip(_shares(processes, len(by_family)), sorted(by_family, key=FAMILIES_DRAWN.index), strict=True):
            pool = stack.enter_context(ProcessPoolExecutor(count, context, initializer=torch.set_num_threads, initargs=(1,)))
            futures += [pool.submit(one, seed) for seed in by_family[family]]
        yield from (future.result() for future in as_completed(futures))


def _shares(processes: int, families: int) -> list[int]:
    """Processes for each family, whose kernels are then compiled and whose steps are captured in few of them; the last families, which are
    slower, have one more where they cannot have the same."""
    return [(processes * (i + 1)) // families - (processes * i) // families or 1 for i in range(families)]


def summary(outcomes: Iterable[Outcome]) -> dict[str, dict[str, int]]:
    """Kind of case -> cases, and responses by verdict; "all" has the sums."""
    found: dict[str, Counter[str]] = {}
    for outcome in outcomes:
        counts = outcome.verdicts + Counter(cases=1, raised=int(outcome.error is not None))
        for kind in (outcome.kind, "all"):
            found[kind] = found.get(kind, Counter()) + counts
    names = ("cases", "equal", "border", "wrong", "raised")
    return {kind: {name: found[kind][name] for name in names} for kind in sorted(found, key=lambda kind: (kind == "all", kind))}


def _report(outcomes: list[Outcome], seconds: float) -> None:
    print("| | cases | equal | border | wrong | raised |\n|---|---|---|---|---|---|")
    for kind, counts in summary(outcomes).items():
        print(f"| {kind} | {' | '.join(map(str, counts.values()))} |")
    slow = {
        family: statistics.mean(times)
        for family in FAMILIES_DRAWN
        if (times := [outcome.seconds for outcome in outcomes if draw_case(outcome.seed).family == family])
    }
    print(f"{seconds:.0f} s; of a case on the device: {', '.join(f'{family} {mean:.2f}' for family, mean in slow.items())}")
    for outcome in [outcome for outcome in outcomes if outcome.is_wrong][:20]:
        case = draw_case(outcome.seed)
        print(f"wrong: --first {outcome.seed} --count 1   {case.kind} {case.family} {case.settings} room {case.room} {case.params}")
        if outcome.error:
            print("   ", outcome.error.replace("\n", "\n    "))


class _Writer:
    """Writes what came of the cases, now and then: a soak that is ended from outside loses little."""

    def __init__(self, options: argparse.Namespace) -> None:
        from benchmarks.step import _about

        self._file, self._start, self._last = options.json, time.monotonic(), 0.0
        self._about = _about(argparse.Namespace(**vars(options) | {"json": None}))

    def __call__(self, outcomes: list[Outcome], every_s: float = 3.0) -> None:
        now = time.monotonic()
        if now - self._last >= every_s:
            self._last = now
            wrong = [outcome.seed for outcome in outcomes if outcome.is_wrong]
            result = {"seconds": round(now - self._start, 1), **summary(outcomes), "wrong_cases": wrong}
            self._file.write_text(json.dumps(self._about | result, indent=1) + "\n")


def main() -> int:
    """Parse, soak, print; the status."""
    parser = argparse.ArgumentParser(description="random generations on a device against the plain engine")
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--minutes", type=float, default=25.0, help="stop after this time")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--processes", type=int, default=1, help="that share the device; each takes the next case when it is free")
    parser.add_argument("--json", type=Path, help="write what came of it to this file")
    options = parser.parse_args()
    start = time.monotonic()
    seeds = range(options.first, options.first + options.count)
    write = _Writer(options) if options.json is not None else lambda outcomes, every_s=0.0: None
    outcomes = soak(seeds, 60 * options.minutes, options.device, options.processes, write)
    write(outcomes, every_s=0.0)
    _report(outcomes, time.monotonic() - start)
    return 1 if not outcomes or any(outcome.is_wrong for outcome in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
