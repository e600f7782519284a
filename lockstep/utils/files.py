"""Objects from a user's own Python files."""

import hashlib
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from lockstep.errors import DataError


@contextmanager
def named_errors(path: Path) -> Iterator[None]:
    """Writes of this file: an OSError in them, as of a full disk, names it."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def load_reference(text: str) -> Any:
    """The object that `path.py:name` refers to; None when `text` is not of that form. Raises as `load_object` does."""
    path, colon, name = text.rpartition(":")
    return load_object(path, name) if colon and path.endswith(".py") else None


def load_object(path: str, name: str) -> Any:
    """The attribute `name` of a Python file (`path` ends in .py) or of an importable module (`path` is dotted).

    A file is executed once a process, however often it is asked for. Raises DataError when the file, the module or
    the name does not exist, and when importing it raises, with the place in the message.
    """
    module = _module_of_file(Path(path).expanduser()) if path.endswith(".py") else _module_by_name(path)
    if not hasattr(module, name):
        public = sorted(n for n in vars(module) if not n.startswith("_"))
        raise DataError(f"{path} has no {name!r}; it defines {public}")
    return getattr(module, name)


def _module_of_file(path: Path) -> ModuleType:
    path = path.resolve()
    if not path.is_file():
        raise DataError(f"{path} does not exist; a Python file was expected")
    # Two files may share a name. The module must be in sys.modules for pickle and dataclasses to find what it defines.
    module_name = f"{path.stem}_{hashlib.blake2b(str(path).encode(), digest_size=6).hexdigest()}"
    if module_name in sys.modules:
        return sys.modules[module_name]
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None, path
    assert spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[module_name]
        is_of_package = isinstance(error, ImportError) and "relative import" in str(error)
        hint = f"; name it as a module of its package (package.{path.stem}) that Python finds (PYTHONPATH)" if is_of_package else ""
        raise DataError(f"importing {path} failed: {_where(error)}{hint}") from error
    return module


def _module_by_name(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except Exception as error:
        # A missing import inside the user's module is that module's failure, not a wrong name.
        if isinstance(error, ModuleNotFoundError) and f"{name}.".startswith(f"{error.name}."):
            expected = "a path that ends in .py, or a dotted name that Python finds (PYTHONPATH)"
            raise DataError(f"no module {name!r}; expected {expected}") from error
        raise DataError(f"importing {name} failed: {_where(error)}") from error


def _where(error: Exception) -> str:
    """What went wrong, after the lines of the user's code that led there: ours and importlib's are of no use to them."""
    frames = traceback.extract_tb(error.__traceback__)
    users = [frame for frame in frames if frame.filename != __file__ and "importlib" not in frame.filename]
    places = [f"{frame.filename}, line {frame.lineno}" for frame in users]
    said = str(error)
    if isinstance(error, SyntaxError) and error.filename:
        places.append(f"{error.filename}, line {error.lineno}")
        said = f"{error.msg}: {(error.text or '').strip()}"
    return f"{type(error).__name__}: {said}" + (f" ({' > '.join(places)})" if places else "")
