"""The C functions of this folder compiled into one library, which is kept in the cache folder by source, compiler and processor."""

import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

from lockstep.generation.cpu.kernels import Library
from lockstep.models.source import cache_folder
from lockstep.observability.spans import progress

_SOURCES = tuple(Path(__file__).parent / name for name in ("attention.c", "decoder.c", "layer.c", "linear.c", "pack.c"))
_HEADERS = tuple(Path(__file__).parent / name for name in ("linear.h", "team.h", "vectors.h"))
_FLAGS = ("-O3", "-march=native", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC")
_COMPILE_S = 60
"""A compiler that takes longer is not waited for."""


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
    texts = [file.read_text() for file in (*_HEADERS, *_SOURCES)]
    about = "\n".join([*texts, compiler, *_FLAGS, platform.machine(), processor])
    file = cache_folder() / "kernels" / f"decoder-{hashlib.sha256(about.encode()).hexdigest()[:16]}.so"
    if not file.is_file():
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=file.parent) as folder:
            made = Path(folder) / file.name
            command = [compiler, *_FLAGS, "-o", str(made), *map(str, _SOURCES), "-lm"]
            with progress("compiling the CPU kernels"):
                subprocess.run(command, check=True, capture_output=True, timeout=_COMPILE_S)
            made.rename(file)
    return file
