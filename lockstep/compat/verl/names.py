"""verl's import paths with the package renamed: `from lockstep.utils.fs import copy_to_local`.

names.txt has the modules and where their names are. Importing another name of such a module raises ImportError, which says what replaces
it. A module that Lockstep has keeps its own names; those of the table are added to it.
"""

import functools
import importlib
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

_OURS = ("functions:", "numbers:", "runner:")
_TRAINER = "lockstep.trainer.ppo.ray_trainer"


def _adopt(trainer_class: type) -> None:
    """See `loop.adopt`, which is imported for a subclass only."""
    importlib.import_module("lockstep.compat.verl.loop").adopt(trainer_class)


class VerlNames:
    """Finds the modules of the table: those that are not here are made of the table alone.

    A finder and a loader by its methods alone: importing their base classes would be a third of the time of `lockstep --help`.
    """

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """The spec of a module of the table, None for any other."""
        if not fullname.startswith("lockstep.") or fullname not in table():
            return None
        real = PathFinder.find_spec(fullname, path, target) if path else None
        if real is None or real.loader is None:
            return ModuleSpec(fullname, self, is_package=True)  # type: ignore[arg-type]
        run = real.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            if any(name.startswith(f"{fullname}.") for name in table()) and "__path__" not in vars(module):
                module.__path__ = []  # so that the table's modules below it are looked for
            module.__getattr__ = functools.partial(resolve, fullname)  # type: ignore[method-assign]
            if fullname == _TRAINER:
                module.RayPPOTrainer.__init_subclass__ = classmethod(_adopt)

        real.loader.exec_module = exec_module  # type: ignore[method-assign]
        return real

    def exec_module(self, module: ModuleType) -> None:
        """Names are looked up when they are asked for; a `*` in the table is the whole of another module."""
        if whole := table()[module.__name__][0].get("*"):
            sys.modules[module.__name__] = importlib.import_module(whole.removesuffix(":*"))
            return
        module.__doc__ = "A module of verl's whose names are elsewhere here; see lockstep.compat.verl.names."
        module.__getattr__ = functools.partial(resolve, module.__name__)  # type: ignore[method-assign]

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Python's own kind of module."""


def resolve(module: str, name: str) -> Any:
    """The object that verl's `name` in `module` is here. Raises ImportError, which says what replaces it, where there is none."""
    targets, why = table()[module]
    if name in targets:
        place, _, attribute = targets[name].partition(":")
        found = importlib.import_module(place)
        return getattr(found, attribute) if attribute else found
    folders = vars(sys.modules[module]).get("__path__", ())
    if name.startswith("__") or f"{module}.{name}" in table() or PathFinder.find_spec(f"{module}.{name}", folders):
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    raise ImportError(f"cannot import name {name!r} from {module!r}: {why} (docs/from_verl.md)")


@functools.cache
def table() -> dict[str, tuple[dict[str, str], str]]:
    """Module -> its names with their places, and what to say of other names."""
    found: dict[str, tuple[dict[str, str], str]] = {}
    for line in read_rows("names.txt"):
        modules, names, why = (part.strip() for part in line.split("|"))
        targets, place = {}, ""
        for word in names.split():
            name, _, other = word.partition("=")
            if word.endswith(":"):
                ours = f"compat.verl.{word[:-1]}" if word in _OURS else word[:-1]
                place = ours[1:] if ours.startswith("/") else f"lockstep.{ours}"
            else:
                targets[name] = place if other == "." else f"{place}:{other or name}"
        found |= {f"lockstep.{module}": (targets, why) for module in modules.split()}
    return found


def read_rows(name: str) -> list[str]:
    """The rows of a table beside this file, without its comments."""
    return [line for line in Path(__file__).with_name(name).read_text().splitlines() if not line.startswith("#")]


def install() -> None:
    """Let the names be imported."""
    sys.meta_path.insert(0, VerlNames())
