# mypy: disable-error-code="no-untyped-def"
# (Triton kernels take no Python types.)
"""Queries, key and value of a new token, of the product of its projections: what all kernels of new_token.py begin with."""

import triton
import triton.language as tl

from lockstep.generation.gpu.early import begin


@triton.jit
def _sum_up(X, BIASES, place, mask, stride_part, PARTS: tl.constexpr, BIAS: tl.constexpr, TYPE: tl.constexpr):
    """What the parts at `place` and the bias add up to, rounded as training rounds it."""
    x = tl.load(X + place, mask=mask, other=0.0)
    for part in tl.static_range(1, PARTS):
        x += tl.load(X + part * stride_part + place, mask=mask, other=0.0)
    if BIAS:
        x += tl.load(BIASES + place, mask=mask, other=0.0).to(tl.float32)
    return x.to(TYPE)


@triton.jit
def _norm_and_rotate(x1, x2, NORM, cos, sin, d, eps, D: tl.constexpr, NORMED: tl.constexpr):
    """The two halves [n, D / 2] of heads, normed and rotated, each rounded as training rounds it."""
    H2: tl.constexpr = D // 2
    TYPE: tl.constexpr = x1.dtype
    x1 = x1.to(tl.float32)
    x2 = x2.to(tl.float32)
    if NORMED:
        scale = tl.rsqrt((tl.sum(x1 * x1, 1) + tl.sum(x2 * x2, 1)) / D + eps)[:, None]
        w1 = tl.load(NORM + d, mask=d < H2, other=0.0).to(tl.float32)[None, :]
        w2 = tl.load(NORM + H2 + d, mask=d < H2, other=0.0).to(tl.float32)[None, :]
        x1 = (x1 * scale * w1).to(TYPE).to(tl.float32)
        x2 = (x2 * scale * w2).to(TYPE).to(tl.float32)
    return (x1 * cos - x2 * sin).to(TYPE), (x2 * cos + x1 * sin).to(TYPE)


@triton.jit
def new_heads(
    new, row, kv_head, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    HALF: tl.constexpr, PARTS: tl.constexpr, BIAS: tl.constexpr, NORM: tl.constexpr, TYPE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The halves of the queries and of the new key, normed and rotated, and the new value, of what the kernel before has left (`new`);
    waits for it."""
    begin(EARLY, LETS_NEXT=True)
    QKV, BIASES, Q_NORM, K_NORM, cos, sin, eps, stride_part = new
    HEADS: tl.constexpr = KV_HEADS * GROUP
    H2: tl.constexpr = D // 2
    g = tl.arange(0, ROWS)
    d = tl.arange(0, HALF)
    whole = tl.arange(0, DP)
    in_half = (d < H2)[None, :]
    QKV += row * ((HEADS + 2 * KV_HEADS) * D)
    q_place = (kv_head * GROUP + g)[:, None] * D + d[None, :]
    q_mask = (g < GROUP)[:, None] & in_half
    q1 = _sum_up(QKV, BIASES, q_place, q_mask, stride_part, PARTS, BIAS, TYPE)
    q2 = _sum_up(QKV, BIASES, q_place + H2, q_mask, stride_part, PARTS, BIAS, TYPE)
    # Every split reads the new key and value, which costs nothing beside its queries; waiting for them after these would.
    k_place = (HEADS + kv_head) * D + d[None, :]
    k1 = _sum_up(QKV, BIASES, k_place, in_half, stride_part, PARTS, BIAS, TYPE)
    k2 = _sum_up(QKV, BIASES, k_place + H2, in_half, stride_part, PARTS, BIAS, TYPE)
    v_place = (HEADS + KV_HEADS + kv_head) * D + whole
    v = _sum_up(QKV, BIASES, v_place, whole < D, stride_part, PARTS, BIAS, TYPE)
    q1, q2 = _norm_and_rotate(q1, q2, Q_NORM, cos, sin, d, eps, D, NORM)
    k1, k2 = _norm_and_rotate(k1, k2, K_NORM, cos, sin, d, eps, D, NORM)
    return q1, q2, k1, k2, v


@triton.jit
def score_of(q1, q2, k1, k2):
    return tl.sum(q1.to(tl.float32) * k1.to(tl.float32) + q2.to(tl.float32) * k2.to(tl.float32), 1)
