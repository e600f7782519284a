"""verl's import paths with the package renamed: `from lockstep.utils.fs import copy_to_local`.

names.txt has the modules and where their names are. Importing another name of such a module raises ImportError, which says what replaces
it. A module that Lockstep has keeps its own names; those of the table are added to it.
"""

import functools
import importlib
import sys
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from lockstep.compat.aliases import Aliases

_OURS = ("functions:", "numbers:", "loop:")


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


def _whole(module: str) -> ModuleType | None:
    """The module that a `*` in the table puts in the place of another."""
    whole = table()[module][0].get("*")
    return importlib.import_module(whole.removesuffix(":*")) if whole else None


def _adopting(module: ModuleType) -> None:
    """A class under the trainer may be one of verl's (`loop.adopt`, which is imported for a subclass only)."""
    if module.__name__ == "lockstep.trainer.ppo.ray_trainer":
        adopt = lambda trainer_class: importlib.import_module("lockstep.compat.verl.loop").adopt(trainer_class)  # noqa: E731
        module.RayPPOTrainer.__init_subclass__ = classmethod(adopt)


def install() -> None:
    """Let the names be imported."""
    sys.meta_path.insert(0, Aliases("lockstep", table, resolve, _whole, _adopting))
