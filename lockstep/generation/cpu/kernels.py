"""The C functions of this folder, compiled where they run and called with tensors: the blocks of an attention, random numbers, the draw.

They are compiled into one library, which is kept in the cache folder by source, compiler and processor.
Activations are float32, on the CPU.

Legend: N tokens, H query heads, K key heads, D size of a head. `pages` are a layer of KVCache in the functions' own order (attention.c),
float32 or bfloat16.
"""

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lockstep.models.source import cache_folder
from lockstep.observability.spans import progress

_BLOCK_ROWS = 12
"""Queries (tokens times the heads that share a key) that read a key together."""
_SOURCES = tuple(Path(__file__).parent / name for name in ("attention.c", "decoder.c", "layer.c", "linear.c", "pack.c"))
_HEADERS = tuple(Path(__file__).parent / name for name in ("linear.h", "team.h", "vectors.h"))
_FLAGS = ("-O3", "-march=native", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC")
_COMPILE_S = 60
"""A compiler that takes longer is not waited for."""


class Library:
    """The compiled functions. `page_size` is the only one that they serve; `panel` is how many columns of a weight lie side by side;
    `has_pairs` says whether they multiply bfloat16 itself."""

    def __init__(self, file: Path) -> None:
        self._library = ctypes.CDLL(str(file))
        self.page_size: int = self._library.page_tokens()
        self.panel: int = self._library.panel_columns()
        self.has_pairs = bool(self._library.has_pairs())
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


@dataclass(frozen=True)
class Pages:
    """Keys and values of one layer, each [pages, page size, K, D]."""

    keys: Tensor
    values: Tensor

    @property
    def half(self) -> int:
        """1 for bfloat16, 0 for float32."""
        return int(self.keys.dtype == torch.bfloat16)


def check_type(dtype: torch.dtype, *tensors: Tensor) -> None:
    """The functions get addresses: what is there must be what they take it for."""
    assert all(tensor.dtype == dtype and tensor.is_contiguous() for tensor in tensors)


def attention_blocks(query_lens: Sequence[int], context_lens: Sequence[int], groups: int) -> Tensor:
    """[blocks, 4] int32: first token, number of tokens, position of the first and row, for a pass whose rows lie end to end.

    `groups` query heads share a key head.
    """
    size = max(1, _BLOCK_ROWS // groups)
    start = 0
    blocks = array("i")
    for row, (count, context) in enumerate(zip(query_lens, context_lens, strict=True)):
        for i in range(0, count, size):
            blocks.extend((start + i, min(size, count - i), context + i, row))
        start += count
    return torch.frombuffer(blocks, dtype=torch.int32).view(-1, 4)


def single_blocks(query_lens: Sequence[int], positions: Tensor, wanted: Tensor) -> Tensor:
    """`attention_blocks` of the tokens `wanted` [W] alone, each by itself; `positions` [N] are those of every token."""
    rows = torch.repeat_interleave(torch.arange(len(query_lens)), torch.tensor(query_lens))
    return torch.stack([wanted, torch.ones_like(wanted), positions[wanted], rows[wanted]], 1).int()


def uniforms(library: Library, keys: Tensor, positions: Tensor) -> Tensor:
    """`counted.uniforms` of keys and positions [rows] int64, in one call rather than a dozen."""
    check_type(torch.int64, keys, positions)
    out = torch.empty(len(keys))
    library.call("uniforms", keys, positions, out, len(keys))
    return out


def draw(library: Library, logits: Tensor, uniform: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """`sampling.sample` without filters: token [rows] int64 and log-prob [rows] from `logits` [rows, vocabulary]."""
    check_type(torch.float32, logits, uniform)
    tokens = torch.empty(len(logits), dtype=torch.int64)
    log_probs = torch.empty(len(logits))
    library.call("draw", logits, uniform, tokens, log_probs, *logits.shape, int(temperature == 0), float(temperature or 1.0))
    return tokens, log_probs


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
