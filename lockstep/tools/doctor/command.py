"""The command line of `lockstep doctor`."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence

from lockstep import __version__
from lockstep.errors import LockstepError
from lockstep.tools.doctor.parts import machine, parts

_USAGE = "usage: lockstep doctor: versions, devices, optional parts, and a self-test of generation, training and the sandbox"
_TIMEOUT_S = 120.0
"""Longest time of the self-test; it takes about ten seconds."""
Finding = tuple[str, bool, str]
"""Name, whether it is well, what is said."""


def main(arguments: Sequence[str]) -> int:
    """Print what is here and whether it works; returns the exit status: 1 when something that is needed is missing or fails."""
    if arguments:
        print(_USAGE, file=sys.stdout if arguments[0] in ("-h", "--help") else sys.stderr)
        return 0 if arguments[0] in ("-h", "--help") else 2
    started = time.perf_counter()
    print("\n".join([f"lockstep {__version__}", *machine()]))
    wrong = 0
    found = parts()
    for title, is_needed in (("needed", True), ("optional", False)):
        print(f"\n{title}:")
        for part in found:
            if part.is_needed == is_needed:
                mark = "ok " if part.found else "!! " if is_needed else "-  "
                wrong += mark == "!! "
                print(f"  {mark}{part.name:22} {part.found or part.remedy}")
    print("\nself-test:", flush=True)
    has_bwrap = any(part.name == "bubblewrap" and part.found for part in found)
    for name, is_well, text in (*_sandbox(has_bwrap), *_selftest(_TIMEOUT_S)):
        wrong += not is_well
        print(f"  {'ok ' if is_well else '!! '}{name:22} {text}", flush=True)
    verdict = f"{wrong} of what is needed is missing or fails" if wrong else "all that a run needs is here and works"
    print(f"\n{verdict} ({time.perf_counter() - started:.1f} s)")
    return 1 if wrong else 0


def _sandbox(has_bwrap: bool) -> Iterator[Finding]:
    """Whether programs run isolated; where bubblewrap is missing that is said above, and is no fault."""
    from lockstep.judging import make_sandbox

    if not has_bwrap:
        yield "sandbox", True, "not tried without bubblewrap: code rewards refuse to run programs"
        return
    started = time.perf_counter()
    try:
        sandbox = make_sandbox()
        sandbox.check()
        reached = sandbox.run("import socket; socket.create_connection(('127.0.0.1', 22), 1)")
        sandbox.close()
    except LockstepError as error:
        yield "sandbox", False, str(error)
        return
    is_closed = reached.status != "ok"
    said = "a program ran isolated" if is_closed else "a program reached the network"
    yield "sandbox", is_closed, f"{said}; {time.perf_counter() - started:.1f} s"


def _selftest(timeout_s: float) -> Iterator[Finding]:
    """What selftest.py found, in a process that is given up after `timeout_s`."""
    environment = os.environ | {"OMP_WAIT_POLICY": "PASSIVE"}
    command = [sys.executable, "-m", "lockstep.tools.doctor.selftest"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, env=environment)
    except subprocess.TimeoutExpired:
        yield "generation and training", False, f"not done after {timeout_s:.0f} s"
        return
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    for item in found:
        yield item["name"], item["is_well"], item["text"]
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["nothing was said"])[-1]
        yield "generation and training", False, f"the process ended with status {done.returncode}: {last}"
