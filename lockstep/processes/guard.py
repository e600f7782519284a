"""The guard between the parent and a child of `lockstep.processes`: it ends all descendants of the child, whatever their session.

The guard is their "subreaper": the kernel makes it the parent of every descendant whose own parent has ended, so nothing leaves its tree.
"""

import contextlib
import ctypes
import os
import signal
import time

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_SIGNALS = {signal.SIGTERM, signal.SIGCHLD}
_END_S = 5.0


def split(parent: int) -> None:
    """Fork into guard and child. Return in the child. The guard keeps the process id; it ends with the child, at SIGTERM, or when the
    process `parent` ends, and ends all its descendants.

    The guard's exit code is the child's, or 128 + n if signal n ended the child.
    """
    prctl = ctypes.CDLL(None).prctl
    prctl(_PR_SET_CHILD_SUBREAPER, 1)
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        os._exit(1)
    guard = os.getpid()
    child = os.fork()
    if not child:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        if os.getppid() != guard:
            os._exit(1)
        return
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1):  # the pipes are the child's
        os.dup2(nothing, descriptor)
    code = None
    while code is None and signal.sigwait(_SIGNALS) == signal.SIGCHLD:
        code = _reap(child)
    if code is None:
        code = _reap(child)
    _end_tree()
    os._exit(128 + signal.SIGTERM if code is None else code if code >= 0 else 128 - code)


def _reap(child: int) -> int | None:
    """Reap all ended processes; return the exit code of `child` if it is one of them."""
    code = None
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return code
        if not pid:
            return code
        if pid == child:
            code = os.waitstatus_to_exitcode(status)


def _end_tree() -> None:
    """Kill children until none are left: children of a dead child become ours."""
    deadline = time.monotonic() + _END_S
    while time.monotonic() < deadline and (children := _children()):
        for pid in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        _reap(0)
        time.sleep(0.002)


def _children() -> list[int]:
    mine = str(os.getpid())
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat") as file:
                    parent = file.read().rpartition(")")[2].split()[1]
            except OSError:  # gone
                continue
            if parent == mine:
                found.append(int(name))
    return found
