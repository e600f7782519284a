"""Names of a package that are imported on first use, so that importing the package stays cheap."""

import importlib
from collections.abc import Callable, Mapping
from typing import Any


def lazy_names(package: str, names: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a module `__getattr__` for `package`.

    `names` maps a submodule to the names that it provides, separated by spaces; under the key "" stand submodules themselves.
    An unknown name raises AttributeError, as Python does.
    """
    places = {name: module for module, provided in names.items() for name in provided.split()}

    def get(name: str) -> Any:
        if name not in places:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        if not places[name]:
            return importlib.import_module(f"{package}.{name}")
        return getattr(importlib.import_module(f"{package}.{places[name]}"), name)

    return get
