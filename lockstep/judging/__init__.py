"""Judging: run untrusted programs in a sandbox, and grade code and mathematics.

Other rooms import from here; the names below are loaded on first use.
"""

from typing import TYPE_CHECKING

from lockstep.utils.lazy import lazy_names

if TYPE_CHECKING:
    from lockstep.judging import code, competition, geometry, math
    from lockstep.judging.code import extract_program, parses
    from lockstep.judging.math import last_boxed
    from lockstep.judging.sandbox import ProgramLimits, Result, Sandbox, default_sandbox, make_sandbox

__getattr__ = lazy_names(
    __name__,
    {
        "": "code competition geometry math",
        "code": "extract_program parses",
        "math": "last_boxed",
        "sandbox": "ProgramLimits Result Sandbox default_sandbox make_sandbox",
    },
)
