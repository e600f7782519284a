"""How fast the local sandbox runs programs, and what its parts cost.

    python benchmarks/sandbox.py            # speed -> benchmarks/results/sandbox.json
    python benchmarks/sandbox.py --check    # every HumanEval and MBPP reference must pass, and every broken one fail

`--data` is a folder with humaneval.jsonl and mbpp.jsonl (the upstream files).
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from lockstep.judging.code import compute_score  # noqa: E402
from lockstep.judging.sandbox import LocalSandbox, ProgramLimits  # noqa: E402
from lockstep.judging.sandbox.isolation import _inside, find_isolation  # noqa: E402

SMALL = "def add(a, b):\n    return a + b\n\nassert add(1, 2) == 3\nassert add('a', 'b') == 'ab'\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared/data/code")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/sandbox.json")
    parser.add_argument("--note", default="nothing else ran", help="what else the machine did; written beside the numbers")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--tasks", type=int, help="only so many of each file's tasks, for a look at the script itself")
    arguments = parser.parse_args()
    human_eval, mbpp = (_rows(arguments.data / f"{name}.jsonl")[: arguments.tasks] for name in ("humaneval", "mbpp"))
    with LocalSandbox(limits=ProgramLimits(wall_s=60.0 if arguments.check else 10.0)) as sandbox:  # one reference takes seconds
        sandbox.check()
        if arguments.check:
            return check(sandbox, human_eval, mbpp)
        report = {"what": "programs a second in the local sandbox", "note": arguments.note}
        report |= environment() | measure(sandbox, human_eval)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report, indent=2))
    return 0


def check(sandbox: LocalSandbox, human_eval: list[dict[str, Any]], mbpp: list[dict[str, Any]]) -> int:
    """Print how many references pass and how many broken copies do; 1 when a reference fails or a broken copy passes."""
    work = {
        "HumanEval references": [(task["canonical_solution"], task) for task in human_eval],
        "HumanEval returning None": [(f"{task['prompt']}    return None\n", task) for task in human_eval],
        "MBPP references": [(task["code"], task) for task in mbpp],
        "MBPP returning NotImplemented": [(f"{task['code']}\n{_break(task)}", task) for task in mbpp],
    }
    is_right = True
    for name, pairs in work.items():
        results, seconds = timed(sandbox, pairs)
        passed = sum(result["score"] for result in results)
        wanted = 1.0 if "references" in name else 0.0
        print(f"{name}: {passed:g} of {len(pairs)} pass, {len(pairs) / seconds:.1f} a second")
        for (_, task), result in zip(pairs, results, strict=True):
            if result["score"] != wanted:
                is_right = False
                print(f"  {task['task_id']}: {result}")
    return 0 if is_right else 1


def measure(sandbox: LocalSandbox, human_eval: list[dict[str, Any]]) -> dict[str, Any]:
    isolation = find_isolation(accept_weak=False)
    assert isolation.bwrap is not None
    cheapest = [*_inside(isolation.bwrap, None, None, 1 << 20, has_group=False), "/usr/bin/true"]
    costs = {
        "start of /usr/bin/true": _milliseconds(["/usr/bin/true"]),
        "bubblewrap around /usr/bin/true": _milliseconds(cheapest),
        "interpreter (-I -S -c pass)": _milliseconds([isolation.interpreter, "-I", "-S", "-c", "pass"]),
        "sandboxed empty program": _median(lambda: sandbox.run("")),
        "HumanEval reference through the code rule": _median(_each(human_eval)),
    }
    pairs = [(task["canonical_solution"], task) for task in human_eval]
    programs = 2 * len(pairs)
    works: dict[str, Callable[[], bool]] = {
        "small programs with asserts": lambda: _all_ok(sandbox, programs),
        "HumanEval references through the code rule": lambda: all(
            result["score"] == 1.0 for result in timed(sandbox, pairs * 2)[0]
        ),
    }
    rates, cpu = {}, {}
    for name, work in works.items():
        began, used = time.perf_counter(), _cpu_s()
        assert work()
        rates[name] = programs / (time.perf_counter() - began)
        cpu[name] = 1e3 * (_cpu_s() - used) / programs
    return {
        "programs_at_once": sandbox.max_concurrent,
        "programs_per_second": {name: round(rate, 1) for name, rate in rates.items()},
        "cpu_milliseconds_each": {name: round(cost, 1) for name, cost in cpu.items()},
        "median_milliseconds_one_at_a_time": {name: round(cost, 2) for name, cost in costs.items()},
    }


def _all_ok(sandbox: LocalSandbox, times: int) -> bool:
    with ThreadPoolExecutor(sandbox.max_concurrent) as threads:
        return all(result.status == "ok" for result in threads.map(lambda _: sandbox.run(SMALL), range(times)))


def _cpu_s() -> float:
    """CPU seconds of this process and all that it started and has seen end."""
    return sum(os.times()[:4])


def timed(sandbox: LocalSandbox, pairs: Sequence[tuple[str, dict[str, Any]]]) -> tuple[list[dict[str, Any]], float]:
    """Results of the code rule for (response, ground truth) pairs, and the seconds for all."""
    with ThreadPoolExecutor(sandbox.max_concurrent) as threads:
        began = time.perf_counter()
        results = list(threads.map(lambda pair: compute_score(pair[0], pair[1], sandbox=sandbox), pairs))
        return results, time.perf_counter() - began


def environment() -> dict[str, Any]:
    """Where and when this was measured."""

    def told(*command: str) -> str:
        return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False).stdout.strip()

    model = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line), ""
    )
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": told("git", "describe", "--always", "--dirty", "--abbrev=12"),
        "command": "python benchmarks/sandbox.py",
        "hardware": {"cpu": model or platform.machine(), "cores": len(os.sched_getaffinity(0)), "load_before": os.getloadavg()[0]},
        "versions": {"python": platform.python_version(), "kernel": platform.release(), "bubblewrap": told("bwrap", "--version")},
        "user": "root" if os.geteuid() == 0 else "ordinary",
    }


def _each(human_eval: list[dict[str, Any]]) -> Callable[[], Any]:
    tasks = itertools.cycle(human_eval)

    def one() -> Any:
        task = next(tasks)
        return compute_score(task["canonical_solution"], task)

    return one


def _median(run: Callable[[], Any], times: int = 60) -> float:
    """Milliseconds of a call."""
    run()
    taken = []
    for _ in range(times):
        began = time.perf_counter()
        run()
        taken.append(1e3 * (time.perf_counter() - began))
    return statistics.median(taken)


def _milliseconds(command: Sequence[str]) -> float:
    return _median(lambda: subprocess.run(command, check=True, stdin=subprocess.DEVNULL))


def _break(task: dict[str, Any]) -> str:
    names = [line.split("def ")[1].split("(")[0].strip() for line in task["code"].splitlines() if line.startswith("def ")]
    return f"for name in {names}: globals()[name] = lambda *a, **k: NotImplemented"


def _rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


if __name__ == "__main__":
    sys.exit(main())
