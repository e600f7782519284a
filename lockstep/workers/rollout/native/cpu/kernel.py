"""Compile and call `paged_attention.c`. The library is kept in the cache, by source, compiler and processor."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from lockstep.models.attention import Variant
from lockstep.utils.model_source import cache_folder

_SOURCE = Path(__file__).parent / "paged_attention.c"
_FLAGS = ("-O3", "-march=native", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC")
_COMPILE_S = 60
"""A compiler that takes longer is not waited for."""

Kernel = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Variant], Tensor]
"""(q [R, H, D], k_pages, v_pages, page table [R, W] int32, lengths [R] int32, variant) -> [R, H, D], all float32 on the CPU."""


@functools.cache
def paged_attention_kernel() -> Kernel | None:
    """The compiled function, or None where there is no compiler that can make it."""
    compiler = shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return None
    try:
        library = ctypes.CDLL(str(_library(compiler)))
    except (OSError, subprocess.SubprocessError):
        return None
    return functools.partial(_call, library.paged_attention)


def _library(compiler: str) -> Path:
    processor = Path("/proc/cpuinfo").read_text().split("flags", 1)[-1].split("\n", 1)[0] if Path("/proc/cpuinfo").exists() else ""
    about = "\n".join([_SOURCE.read_text(), compiler, *_FLAGS, platform.machine(), processor])
    file = cache_folder() / "kernels" / f"paged_attention-{hashlib.sha256(about.encode()).hexdigest()[:16]}.so"
    if not file.is_file():
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=file.parent) as folder:
            made = Path(folder) / file.name
            subprocess.run(
                [compiler, *_FLAGS, "-o", str(made), str(_SOURCE), "-lm"], check=True, capture_output=True, timeout=_COMPILE_S
            )
            made.rename(file)
    return file


def _call(
    function: Callable[..., None], q: Tensor, k_pages: Tensor, v_pages: Tensor, table: Tensor, lengths: Tensor, variant: Variant
) -> Tensor:
    q, out = q.contiguous(), torch.empty(q.shape)
    sinks = None if variant.sinks is None else variant.sinks.float().contiguous()
    assert all(x.is_contiguous() for x in (k_pages, v_pages, table, lengths))
    assert table.dtype == lengths.dtype == torch.int32
    rows, heads, dim = q.shape
    function(
        *(ctypes.c_void_p(x.data_ptr()) for x in (q, k_pages, v_pages, table, lengths, out)),
        *map(ctypes.c_int, (rows, heads, k_pages.shape[2], dim, k_pages.shape[1], table.shape[1])),
        ctypes.c_float(dim**-0.5 if variant.scaling is None else variant.scaling),
        ctypes.c_int(variant.sliding_window or 0),
        ctypes.c_float(variant.softcap or 0.0),
        ctypes.c_void_p(None if sinks is None else sinks.data_ptr()),
        ctypes.c_int(torch.get_num_threads()),
    )
    return out
