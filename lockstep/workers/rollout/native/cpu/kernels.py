"""The C functions of this folder: compiled into one library, kept in the cache folder by source, compiler and processor, and called with
tensors: attention over pages, the parts of a decoder layer, the draw. Activations are float32, on the CPU.

Legend: N tokens, H query heads, K key heads, D size of a head. `pages` are a layer of KVCache in the functions' own order (attention.c),
float32 or bfloat16.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lockstep.models.cached_attention import Variant
from lockstep.observability.spans import progress
from lockstep.utils.model_source import cache_folder

_SOURCES = tuple(Path(__file__).parent / name for name in ("attention.c", "layer.c", "linear.c"))
_HEADER = Path(__file__).parent / "vectors.h"
_FLAGS = ("-O3", "-march=native", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC")
_COMPILE_S = 60
"""A compiler that takes longer is not waited for."""
_BLOCK_ROWS = 12
"""Queries (tokens times the heads that share a key) that read a key together."""


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
            with progress("compiling the CPU kernels"):
                subprocess.run(command, check=True, capture_output=True, timeout=_COMPILE_S)
            made.rename(file)
    return file


@dataclass(frozen=True, slots=True)
class Pages:
    """Keys and values of one layer, each [pages, page size, K, D]."""

    keys: Tensor
    values: Tensor

    @property
    def half(self) -> int:
        """1 for bfloat16, 0 for float32."""
        return int(self.keys.dtype == torch.bfloat16)


def _check(dtype: torch.dtype, *tensors: Tensor) -> None:
    """The functions get addresses: what is there must be what they take it for."""
    assert all(tensor.dtype == dtype and tensor.is_contiguous() for tensor in tensors)


def attention_blocks(query_lens: Sequence[int], context_lens: Sequence[int], groups: int) -> Tensor:
    """[blocks, 4] int32: first token, number of tokens, position of the first and row, for a pass whose rows lie end to end.

    `groups` query heads share a key head.
    """
    size, start, blocks = max(1, _BLOCK_ROWS // groups), 0, []
    for row, (count, context) in enumerate(zip(query_lens, context_lens, strict=True)):
        blocks += [(start + i, min(size, count - i), context + i, row) for i in range(0, count, size)]
        start += count
    return torch.tensor(blocks, dtype=torch.int32)


def attend(library: Library, q: Tensor, pages: Pages, table: Tensor, blocks: Tensor, variant: Variant) -> Tensor:
    """Attention of q [N, H, D] over what its rows have in `pages`, the new tokens included: [N, H, D]. `table` is [rows, width] int32."""
    _check(torch.float32, q[0])
    _check(torch.int32, table, blocks)
    _, heads, dim = q.shape
    out = torch.empty(q.shape)
    sinks = None if variant.sinks is None else variant.sinks.float().contiguous()
    scaling = dim**-0.5 if variant.scaling is None else variant.scaling
    shape = (q.stride(0), len(blocks), heads, pages.keys.shape[2], dim, table.shape[1], variant.sliding_window or 0, pages.half)
    library.call(
        "attention", q, pages.keys, pages.values, table, blocks, out, sinks, *shape, float(scaling), float(variant.softcap or 0.0)
    )
    return out


def store(library: Library, keys: Tensor, values: Tensor, slots: Tensor, pages: Pages) -> None:
    """Put keys and values [N, K, D], float32, into the pages at `slots` [N] int64."""
    _check(torch.float32, keys[0], values[0])
    assert len(keys) == 1 or keys.stride(0) == values.stride(0)
    library.call("store_keys_values", keys, values, slots, pages.keys, pages.values, keys.stride(0), *keys.shape, pages.half)


def rms_norm(library: Library, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """weight * x / sqrt(mean(x^2) + eps) over the last dimension of x [N, size]."""
    _check(torch.float32, x, weight)
    out = torch.empty_like(x)
    library.call("rms_norm", x, weight, out, *x.shape, eps)
    return out


def rotate(
    library: Library,
    qk: Tensor,
    num_queries: int,
    angles: tuple[Tensor, Tensor],
    positions: Tensor,
    norms: tuple[Tensor | None, Tensor | None],
    eps: float,
) -> None:
    """Turn the heads qk [N, heads, D] by their positions [N] int64, in place; `angles` are cos and sin [positions, D / 2].

    `norms` are the weights of the norms that come before it, of the first `num_queries` heads and of the others.
    """
    tokens, heads, dim = qk.shape
    _check(torch.float32, qk[0])
    library.call("rotate", qk, *angles, positions, *norms, qk.stride(0), tokens, heads, num_queries, dim, eps)


def draw(library: Library, logits: Tensor, uniform: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """`sampling.sample` without filters: token [rows] int64 and log-prob [rows] from `logits` [rows, vocabulary]."""
    _check(torch.float32, logits, uniform)
    tokens, log_probs = torch.empty(len(logits), dtype=torch.int64), torch.empty(len(logits))
    library.call("draw", logits, uniform, tokens, log_probs, *logits.shape, int(temperature == 0), float(temperature or 1.0))
    return tokens, log_probs
