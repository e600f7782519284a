"""Compile the C files of this folder into one library and call it. It is kept in the cache, by source, compiler and processor."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lockstep.utils.model_source import cache_folder

_SOURCES = tuple(Path(__file__).parent / name for name in ("attention.c", "layer.c", "linear.c"))
_HEADER = Path(__file__).parent / "vectors.h"
_FLAGS = ("-O3", "-march=native", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC")
_COMPILE_S = 60
"""A compiler that takes longer is not waited for."""


class Library:
    """The compiled functions. `page_size` is the only one that they serve; `panel` is how many columns of a weight lie side by side."""

    def __init__(self, file: Path) -> None:
        self._library = ctypes.CDLL(str(file))
        self.page_size: int = self._library.page_tokens()
        self.panel: int = self._library.panel_columns()
        self._functions: dict[str, Any] = {}

    def call(self, name: str, *arguments: Tensor | int | float | None) -> None:
        """Call `name`: tensors are passed as pointers, None as NULL; the number of threads, always the last argument, is torch's."""
        function = self._functions.get(name)
        if function is None:
            function = self._functions[name] = getattr(self._library, name)
            function.argtypes = [*map(_c_type, arguments), ctypes.c_int64]
            function.restype = None
        function(*[x.data_ptr() if isinstance(x, Tensor) else x for x in arguments], torch.get_num_threads())


def _c_type(value: Tensor | int | float | None) -> Any:
    if value is None or isinstance(value, Tensor):
        return ctypes.c_void_p
    return ctypes.c_float if isinstance(value, float) else ctypes.c_int64


@functools.cache
def library() -> Library | None:
    """The compiled functions, or None where there is no compiler that can make them."""
    compiler = shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return None
    try:
        return Library(_compiled(compiler))
    except (OSError, subprocess.SubprocessError):
        return None


def _compiled(compiler: str) -> Path:
    processor = Path("/proc/cpuinfo").read_text().split("flags", 1)[-1].split("\n", 1)[0] if Path("/proc/cpuinfo").exists() else ""
    texts = [file.read_text() for file in (_HEADER, *_SOURCES)]
    about = "\n".join([*texts, compiler, *_FLAGS, platform.machine(), processor])
    file = cache_folder() / "kernels" / f"decoder-{hashlib.sha256(about.encode()).hexdigest()[:16]}.so"
    if not file.is_file():
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=file.parent) as folder:
            made = Path(folder) / file.name
            command = [compiler, *_FLAGS, "-o", str(made), *map(str, _SOURCES), "-lm"]
            subprocess.run(command, check=True, capture_output=True, timeout=_COMPILE_S)
            made.rename(file)
    return file
