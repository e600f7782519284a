"""Judging: run untrusted programs in a sandbox, and grade code and mathematics.

Other rooms import from here; the names below are loaded on first use.
"""

from typing import TYPE_CHECKING

from lockstep.utils.lazy import lazy_names

if TYPE_CHECKING:
    from lockstep.judging import code, competition, geometry, math
    from lockstep.judging.code import extract_program, parses
    from lockstep.judging.math import last_boxed
    from lockstep.judging.sandbox import Limits, Result, Sandbox, default_sandbox, make_sandbox

__all__ = [
    "Limits", "Result", "Sandbox", "code", "competition", "default_sandbox", "extract_program", "geometry", "last_boxed", "make_sandbox",
    "math", "parses",
]  # fmt: skip

__getattr__ = lazy_names(
    __name__,
    {
        "lockstep.judging": ("code", "competition", "geometry", "math"),
        "lockstep.judging.code": ("extract_program", "parses"),
        "lockstep.judging.math": ("last_boxed",),
        "lockstep.judging.sandbox": ("Limits", "Result", "Sandbox", "default_sandbox", "make_sandbox"),
    },
)
