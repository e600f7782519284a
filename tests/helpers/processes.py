"""Processes that a test looks for."""

import time

import psutil


def runs(pid: int) -> bool:
    """Whether there is such a process. One that nobody has reaped has ended."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def are_gone(pids: list[int], within_s: float = 10.0) -> bool:
    """Whether all of them have ended by then."""
    until = time.monotonic() + within_s
    while any(map(runs, pids)):
        if time.monotonic() > until:
            return False
        time.sleep(0.05)
    return True
