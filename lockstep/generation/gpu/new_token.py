# mypy: disable-error-code="no-untyped-def"
# (Triton kernels take no Python types.)
"""Attention of one new token for each of few rows, from the product of its projections to what the output projection reads, in one kernel.

One program computes one row, one KV head (its query heads together) and one split of the context. It adds up the parts of the product
and the bias, norms (Qwen3) and rotates its queries and the new key. The split that the new token falls into stores its key and value, and
has them at hand instead of reading them back. The split that ends last of a row and KV head adds up what all of them have left, in the
order of the splits, so that it does not matter which one that is. While the product ends, a program asks for its first keys and values
(early.py): into shared memory where all programs fit on the GPU at once, else into the L2 cache.

How a program goes over its split is in over_pages.py, and for float8 keys and values in over_float8.py.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lockstep.generation.gpu.early import early, fetch
from lockstep.generation.gpu.float8 import packed_scales
from lockstep.generation.gpu.over_float8 import over_float8_pages
from lockstep.generation.gpu.over_pages import over_pages

MOST_PAIRS = 256
"""Rows times KV heads at most. With more, contexts need not be cut, and shared prefixes are read together (attention.py)."""
_PROGRAMS = 200
"""More than one for each multiprocessor of an H100 or H200; with twice as many the splits take longer to join than they save."""
_MOST_SPLITS = 16
_SMALL_PROGRAMS = 500
_SMALL = {"TILE": 64, "num_warps": 2, "num_stages": 7}
"""How float8 pages are read: by smaller programs, and more of them."""
_MOST_LOADING_WARPS = 1024
"""Of programs that load keys and values before they wait, which takes twice the registers: what an H100 or H200 has room for at once."""


def cuts(rows: int, kv_heads: int, kept: str = "auto") -> int:
    """Return the number of splits of each row's context: 2, 4, 8 or 16, or 1 if there are too many rows."""
    pairs = rows * kv_heads
    if pairs > MOST_PAIRS:
        return 1
    programs = _PROGRAMS if kept == "auto" else _SMALL_PROGRAMS
    splits = triton.next_power_of_2(triton.cdiv(programs, pairs))
    return min(_MOST_SPLITS, max(2, splits))


def _stages(rows: int, loads_first: bool) -> int:
    """Tiles of keys and values that a program has in flight. With four, more programs fit on a multiprocessor, which many rows need."""
    return 5 if rows <= 32 or loads_first else 4


class NewToken:
    """For layers with `heads` query heads. `cos` and `sin` [positions, D / 2]."""

    def __init__(self, heads: int, cos: Tensor, sin: Tensor, eps: float) -> None:
        self._heads = heads
        self._cos = cos
        self._sin = sin
        self._eps = eps
        self._arrived = torch.zeros(MOST_PAIRS, dtype=torch.int32, device=cos.device)
        """How many splits of a row and KV head have ended; the last one sets it back."""

    def __call__(
        self,
        qkv: Tensor,
        bias: Tensor | None,
        norms: tuple[Tensor, Tensor] | None,
        k_pages: Tensor,
        v_pages: Tensor,
        positions: Tensor,
        slots: Tensor,
        page_table: Tensor,
        context_lens: Tensor,
        *,
        scale: float,
        window: int | None,
        splits: int,
        scales: Tensor | None = None,
        kept: str = "auto",
    ) -> Tensor:
        """[rows, heads D] of `qkv` [rows, (heads + 2 kv_heads) D], or of parts [parts, rows, ...] that add up, with `bias`, to it.

        Key and value go to `slots` of the pages. No row may read what another one writes. `norms` are the weights of the heads' norms,
        of queries and of keys. The rest is as in `paged_attention`.
        """
        page_size, kv_heads, dim = k_pages.shape[1:]
        rows, width = qkv.shape[-2:]
        heads = self._heads
        assert rows * kv_heads <= MOST_PAIRS, f"{rows} rows of {kv_heads} KV heads are too many"
        out = torch.empty(rows, heads * dim, dtype=self._cos.dtype, device=qkv.device)
        part = sums = out
        if splits > 1:
            part = torch.empty(splits, rows, heads, dim, dtype=torch.float32, device=qkv.device)
            sums = torch.empty(2, splits, rows, heads, dtype=torch.float32, device=qkv.device)
        padded = max(16, triton.next_power_of_2(dim))
        q_norm, k_norm = norms or (out, out)
        tile = max(16, min(page_size, 16384 // (padded * out.element_size())))
        warps = 4 if scales is None else _SMALL["num_warps"]
        loads_first = rows * kv_heads * splits * warps <= _MOST_LOADING_WARPS
        reading = {"TILE": tile, "num_warps": warps, "num_stages": _stages(rows, loads_first)}
        if scales is not None:
            reading = _SMALL | {"TILE": min(_SMALL["TILE"], 2 * page_size)}
        _attend_new[(rows, kv_heads, splits)](
            qkv, out if bias is None else bias, self._cos, self._sin, positions, slots, k_pages, v_pages, packed_scales(scales, out),
            page_table, context_lens,
            q_norm, k_norm, out, part, sums, self._arrived, self._eps, scale, window or 0, page_table.stride(0), rows * width,
            KV_HEADS=kv_heads, GROUP=heads // kv_heads, D=dim, DP=padded,
            ROWS=max(16 if scales is None else 8, triton.next_power_of_2(heads // kv_heads)),
            HALF=max(16, triton.next_power_of_2(dim // 2)), PAGE=page_size, SPLITS=splits,
            PARTS=qkv.shape[0] if qkv.dim() == 3 else 0, BIAS=bias is not None, NORM=norms is not None, WINDOW=window is not None,
            PRECISION="ieee" if out.dtype == torch.float32 else "tf32", KEPT=kept, ASM=qkv.is_cuda,
            LOADS_FIRST=loads_first, **reading, **early(qkv),
        )  # fmt: skip
        return out


@triton.jit
def _attend_new(
    QKV, BIASES, COS, SIN, POSITION, SLOT, KP, VP, SCALES, TABLE, CONTEXT, Q_NORM, K_NORM, OUT, PART, SUMS, ARRIVED, eps, scale, window,
    stride_table, stride_part,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, HALF: tl.constexpr,
    PAGE: tl.constexpr, TILE: tl.constexpr, SPLITS: tl.constexpr, PARTS: tl.constexpr, BIAS: tl.constexpr, NORM: tl.constexpr,
    WINDOW: tl.constexpr, PRECISION: tl.constexpr, KEPT: tl.constexpr, ASM: tl.constexpr, LOADS_FIRST: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    HEADS: tl.constexpr = KV_HEADS * GROUP
    H2: tl.constexpr = D // 2
    TYPE: tl.constexpr = OUT.dtype.element_ty
    LOG2_E: tl.constexpr = 1.4426950408889634
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    end = tl.load(CONTEXT + row)
    first = 0
    if WINDOW:
        first = tl.maximum(end + 1 - window, 0)
    low, high, is_last = first // TILE * TILE, end, split == 0
    if SPLITS > 1:
        share = tl.cdiv(tl.cdiv(end + 1 - low, TILE), SPLITS) * TILE
        is_last = (end - low) // share == split
        low = low + split * share
        high = tl.minimum(low + share, end)

    g = tl.arange(0, ROWS)
    d = tl.arange(0, HALF)
    whole = tl.arange(0, DP)
    t = tl.arange(0, TILE)
    position = tl.load(POSITION + row)
    cos = tl.load(COS + position * H2 + d, mask=d < H2, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(SIN + position * H2 + d, mask=d < H2, other=0.0).to(tl.float32)[None, :]
    slot = tl.load(SLOT + row)
    TABLE += row * stride_table
    if EARLY and not LOADS_FIRST:
        # The first tile of keys and values, in lines of 128 bytes; no kernel of this step writes them.
        LINE: tl.constexpr = 1024 // KP.dtype.element_ty.primitive_bitwidth
        TOKEN: tl.constexpr = KV_HEADS * D if KEPT == "auto" else D
        HEAD: tl.constexpr = D if KEPT == "auto" else PAGE * D
        token = tl.maximum(tl.minimum(low + t, high - 1), 0)
        pages = tl.load(TABLE + token // PAGE).to(tl.int64)
        line = tl.minimum(tl.arange(0, max(1, DP // LINE)) * LINE, D - 1)
        at = pages * (PAGE * KV_HEADS * D) + token % PAGE * TOKEN + kv_head * HEAD
        fetch(KP + at[:, None] + line[None, :])
        fetch(VP + at[:, None] + line[None, :])
    new = (QKV, BIASES, Q_NORM, K_NORM, cos, sin, eps, stride_part)
    # A split without a token takes one turn too where it waits in it, and sees none.
    stop = tl.maximum(high, low + 1) if LOADS_FIRST else high
    cut = (row, kv_head, slot, is_last, first, low, stop, high, end, scale * LOG2_E)
    if KEPT == "fp8":
        peak, total, acc = over_float8_pages(
            new, cut, KP, VP, SCALES, TABLE, KV_HEADS, GROUP, ROWS, D, DP, HALF, PAGE, TILE, PARTS, BIAS, NORM, WINDOW, TYPE, ASM,
            LOADS_FIRST, EARLY,
        )  # fmt: skip
    else:
        peak, total, acc = over_pages(
            new, cut, KP, VP, TABLE, KV_HEADS, GROUP, ROWS, D, DP, HALF, PAGE, TILE, PARTS, BIAS, NORM, WINDOW, TYPE, PRECISION,
            LOADS_FIRST, EARLY,
        )  # fmt: skip
    i = row * HEADS + (kv_head * GROUP + g)
    mask = (g < GROUP)[:, None] & (whole < D)[None, :]
    if SPLITS > 1:
        stride = tl.num_programs(0) * HEADS
        at = split * stride + i
        tl.store(SUMS + at, peak, mask=g < GROUP)
        tl.store(SUMS + SPLITS * stride + at, total, mask=g < GROUP)
        tl.store(PART + at[:, None] * D + whole[None, :], acc, mask=mask)
        tl.debug_barrier()  # every thread's part is written before one of them says so
        counter = ARRIVED + row * KV_HEADS + kv_head
        if tl.atomic_add(counter, 1, sem="acq_rel") == SPLITS - 1:
            _join(SUMS, PART, OUT, i, whole, g < GROUP, mask, stride, D, ROWS, DP, SPLITS)
            tl.store(counter, 0)
    else:
        tl.store(OUT + i[:, None] * D + whole[None, :], (acc / total[:, None]).to(TYPE), mask=mask)


@triton.jit
def _join(
    SUMS, PART, OUT, i, d, in_group, mask, stride, D: tl.constexpr, ROWS: tl.constexpr, DP: tl.constexpr, SPLITS: tl.constexpr
):  # fmt: skip
    """Add up what the splits have left of the heads i. Read past the first cache, which may hold what was there before."""
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    for s in tl.static_range(SPLITS):
        peak = tl.maximum(peak, tl.load(SUMS + s * stride + i, mask=in_group, other=0.0, cache_modifier=".cg"))
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DP], tl.float32)
    for s in tl.static_range(SPLITS):
        weight = tl.exp2(tl.load(SUMS + s * stride + i, mask=in_group, other=0.0, cache_modifier=".cg") - peak)
        total += weight * tl.load(SUMS + (SPLITS + s) * stride + i, mask=in_group, other=1.0, cache_modifier=".cg")
        part = tl.load(PART + (s * stride + i)[:, None] * D + d[None, :], mask=mask, other=0.0, cache_modifier=".cg")
        acc += weight[:, None] * part
    tl.store(OUT + i[:, None] * D + d[None, :], (acc / total[:, None]).to(OUT.dtype.element_ty), mask=mask)
