"""Lockstep trains language models with reinforcement learning.

`lockstep.DataProto` is imported on first use, so that importing the package (and `lockstep --help`) does not pay for torch.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lockstep.protocol import DataProto

__all__ = ["DataProto", "__version__"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name == "DataProto":
        from lockstep.protocol import DataProto

        return DataProto
    raise AttributeError(f"module 'lockstep' has no attribute {name!r}")
