"""An import hook: modules, and names in modules, that are elsewhere. What stands where is the business of whoever installs it."""

import functools
import sys
from collections.abc import Callable, Collection, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any


class Aliases:
    """Finds the modules of `package` that `modules()` names. Of one that is not there as a file, `resolve(module, name)` gives every name,
    or `stands_for(module)`, where it is not None, is the module itself. One that is there has its own names and those of `resolve`;
    `loaded(module)` hears of it.

    A finder and a loader by its methods alone: importing their base classes would be a third of the time of `lockstep --help`.
    """

    def __init__(
        self, package: str, modules: Callable[[], Collection[str]], resolve: Callable[[str, str], Any],
        stands_for: Callable[[str], ModuleType | None], loaded: Callable[[ModuleType], None],
    ) -> None:  # fmt: skip
        self._package, self._modules, self._resolve, self._stands_for, self._loaded = package, modules, resolve, stands_for, loaded

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """The spec of such a module, None for any other."""
        if not fullname.startswith(f"{self._package}.") or fullname not in self._modules():
            return None
        real = PathFinder.find_spec(fullname, path, target) if path else None
        if real is None or real.loader is None:
            return ModuleSpec(fullname, self, is_package=True)  # type: ignore[arg-type]
        run = real.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            if any(name.startswith(f"{fullname}.") for name in self._modules()) and "__path__" not in vars(module):
                module.__path__ = []  # so that modules below it are looked for
            module.__getattr__ = functools.partial(self._resolve, fullname)  # type: ignore[method-assign]
            self._loaded(module)

        real.loader.exec_module = exec_module  # type: ignore[method-assign]
        return real

    def exec_module(self, module: ModuleType) -> None:
        """Names are looked up when they are asked for."""
        if (whole := self._stands_for(module.__name__)) is not None:
            sys.modules[module.__name__] = whole
            return
        module.__doc__ = "A module of another package whose names are elsewhere here."
        module.__getattr__ = functools.partial(self._resolve, module.__name__)  # type: ignore[method-assign]

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Python's own kind of module."""
