"""Lockstep trains language models with reinforcement learning.

`lockstep.DataProto` and `lockstep.read_run` are imported on first use, so that importing the package (and `lockstep --help`) does not pay
for torch.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lockstep.protocol import DataProto
    from lockstep.tools.report.run_folder import read_run

__all__ = ["DataProto", "__version__", "read_run"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name == "DataProto":
        from lockstep.protocol import DataProto

        return DataProto
    if name == "read_run":
        from lockstep.tools.report.run_folder import read_run

        return read_run
    raise AttributeError(f"module 'lockstep' has no attribute {name!r}")
