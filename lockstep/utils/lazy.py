"""Names of a package that are imported on first use, so that importing the package stays cheap."""

import importlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any


def lazy_names(package: str, names: Mapping[str, Iterable[str]]) -> Callable[[str], Any]:
    """Return a module `__getattr__` for `package`: `names` maps a module to the names that it provides.

    A module equal to `package` itself stands for its submodules. An unknown name raises AttributeError, as Python does.
    """
    places = {name: module for module, provided in names.items() for name in provided}

    def get(name: str) -> Any:
        if name not in places:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        place = places[name]
        if place == package:
            return importlib.import_module(f"{package}.{name}")
        return getattr(importlib.import_module(place), name)

    return get
