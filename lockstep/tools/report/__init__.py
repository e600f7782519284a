"""`lockstep report` and `lockstep watch`: a run in a browser, from a file or live; and `lockstep.read_run`, the same data in Python."""

from typing import TYPE_CHECKING

from lockstep.utils.lazy import lazy_names

if TYPE_CHECKING:
    from lockstep.tools.report.command import write_report

__getattr__ = lazy_names(__name__, {"command": "write_report"})
