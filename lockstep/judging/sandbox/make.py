"""From configuration values to a sandbox."""

import os
import threading

from lockstep.judging.sandbox.base import ProgramLimits, Sandbox
from lockstep.judging.sandbox.fusion import FusionSandbox
from lockstep.judging.sandbox.local import LocalSandbox

_MAX_REMOTE = 64

_default: tuple[int, Sandbox] | None = None
_default_lock = threading.Lock()


def make_sandbox(
    url: str | None = None,
    max_concurrent: int | None = None,
    wall_s: float = 10.0,
    memory_mb: int = 1024,
    accept_weak_isolation: bool = False,
) -> Sandbox:
    """A sandbox that has run a first program.

    Args:
        url: Address of a SandboxFusion server; None: this machine.
        max_concurrent: Programs at a time; None: one a core, or 64 on a server.
        wall_s: Seconds for a program; for each test case of a code reward.
        memory_mb: Memory for a program and all its processes.
        accept_weak_isolation: Where bubblewrap is missing, run programs without isolation instead of raising.

    Raises ResourceError when programs cannot be run, ConfigError for a value that cannot work.
    """
    limits = ProgramLimits(wall_s=wall_s, memory_mb=memory_mb)
    sandbox: Sandbox
    if url is not None:
        sandbox = FusionSandbox(url, _MAX_REMOTE if max_concurrent is None else max_concurrent, limits)
    else:
        sandbox = LocalSandbox(max_concurrent, limits, accept_weak_isolation)
    sandbox.check()
    return sandbox


def default_sandbox() -> Sandbox:
    """One sandbox for this process, on this machine, made when first asked for. Raises as `make_sandbox`."""
    global _default
    with _default_lock:
        if _default is None or _default[0] != os.getpid():  # a fork inherits the object but not the threads that hold its places
            _default = (os.getpid(), make_sandbox())
        return _default[1]
