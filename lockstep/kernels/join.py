# mypy: disable-error-code="no-untyped-def"
# (Triton kernels take no Python types.)
"""Join two attention passes over the same queries, in place and in one pass over their outputs."""

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _join(OUT, MORE, LSE, MORE_LSE, lse_head, more_lse_head, heads, HEADS: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, HEADS)
    inside = head < heads
    mine = tl.load(LSE + head * lse_head + token, mask=inside, other=0.0)
    theirs = tl.load(MORE_LSE + head * more_lse_head + token, mask=inside, other=0.0)
    largest = tl.maximum(mine, theirs)
    joined = largest + tl.log(tl.exp(mine - largest) + tl.exp(theirs - largest))
    place = tl.arange(0, BLOCK)[None, :]
    both = inside[:, None] & (place < SIZE)
    at = (token * heads + head[:, None]) * SIZE + place
    a = tl.load(OUT + at, mask=both).to(tl.float32) * tl.exp(mine - joined)[:, None]
    b = tl.load(MORE + at, mask=both).to(tl.float32) * tl.exp(theirs - joined)[:, None]
    tl.store(OUT + at, (a + b).to(OUT.dtype.element_ty), mask=both)
    tl.store(LSE + head * lse_head + token, joined, mask=inside)


def join(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> None:
    """Make `out` [N, H, D] and `lse` [H, N] those of the softmax over both sets of keys; `more`, `more_lse` are of the second set."""
    tokens, heads, size = out.shape
    assert out.is_contiguous()
    assert more.is_contiguous()
    assert lse.stride(1) == more_lse.stride(1) == 1
    _join[(tokens,)](
        out, more, lse, more_lse, lse.stride(0), more_lse.stride(0), heads,
        HEADS=triton.next_power_of_2(heads), SIZE=size, BLOCK=triton.next_power_of_2(size), num_warps=4,
    )  # fmt: skip
