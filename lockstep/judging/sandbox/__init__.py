"""Runs untrusted programs: on this machine, isolated by bubblewrap, or on a SandboxFusion server. Same calls for both.

`make_sandbox` is the constructor that configuration goes to; `default_sandbox` is what code rewards use when none is given.
"""

from lockstep.judging.sandbox.base import ProgramLimits, Result, Sandbox, Status
from lockstep.judging.sandbox.local import LocalSandbox
from lockstep.judging.sandbox.make import default_sandbox, make_sandbox

__all__ = ["LocalSandbox", "ProgramLimits", "Result", "Sandbox", "Status", "default_sandbox", "make_sandbox"]
