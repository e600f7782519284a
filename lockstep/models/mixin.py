"""Change the class of a module in place, so that its forward does something else over the same parameters.

This is the only place that exchanges classes. `isinstance` and `super()` then work as if the module had been built so, and whatever wraps
the module later (FSDP2 exchanges classes too) keeps the change.
"""

from functools import cache
from typing import Any

from torch import nn


def extend_class(module: nn.Module, mixin: type) -> None:
    """Put `mixin` before the class of `module`; the new class has the name of the old one."""
    own: Any = type(module)
    module.__class__ = _extended(own, mixin)


def replace_class(module: nn.Module, subclass: type[nn.Module]) -> None:
    """Make `module` an instance of `subclass`, which derives from its class and needs no other attributes."""
    assert issubclass(subclass, type(module)), f"{subclass.__name__} does not derive from {type(module).__name__}"
    module.__class__ = subclass


@cache
def _extended(own: Any, mixin: Any) -> Any:
    # One class for all layers of a kind: torch.compile compiles each class anew.
    return type(own.__name__, (mixin, own), {"__module__": own.__module__})
