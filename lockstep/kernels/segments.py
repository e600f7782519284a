# mypy: disable-error-code="no-untyped-def"
# (Triton kernels take no Python types.)
"""Flash attention over packed segments, where a segment may also see all of one before it, in one pass over both.

A tile is a run of tokens of one segment. Its queries see the segment's keys up to their own, and all keys of the segment that it continues
(`before`); its keys are seen by the segment's later queries, and by all queries of those that continue it (`after`), which lie end to end.
A program has one tile and one head, and the gradient of a key is summed over the query heads that share it in their order: nothing is
added to by two programs, so that results are the same bits each time. Scores are in units of log2.
Legend: N tokens, H query heads, K key-value heads, D head size.
"""

import triton
import triton.language as tl

LOG2_E = 1.4426950408889634


@triton.jit
def _load(X, tokens, inside, head, heads, D: tl.constexpr, MASKED: tl.constexpr = True):
    """[tokens, D] of one head of X [N, heads, D]; 0 where not `inside`."""
    at = (tokens.to(tl.int64) * heads + head)[:, None] * D + tl.arange(0, D)[None, :]
    if MASKED:
        return tl.load(X + at, mask=inside[:, None], other=0.0)
    return tl.load(X + at)


@triton.jit
def _attend_block(
    q, K, V, tokens, inside, queries, kv_head, kv_heads, scale, total, largest, out,
    D: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    k = _load(K, tokens, inside, kv_head, kv_heads, D, MASKED)
    s = tl.dot(q, tl.trans(k)) * scale
    if CAUSAL:
        s = tl.where(queries[:, None] >= tokens[None, :], s, float("-inf"))
    elif MASKED:
        s = tl.where(inside[None, :], s, float("-inf"))
    higher = tl.maximum(largest, tl.max(s, 1))
    p = tl.math.exp2(s - higher[:, None])
    keep = tl.math.exp2(largest - higher)
    total = total * keep + tl.sum(p, 1)
    v = _load(V, tokens, inside, kv_head, kv_heads, D, MASKED)
    out = out * keep[:, None] + tl.dot(p.to(v.dtype), v)
    return total, higher, out


@triton.jit(do_not_specialize=["num_tokens"])
def forward(
    Q, K, V, OUT, LSE, TILES, scale, num_tokens, heads, kv_heads, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """OUT [N, H, D] and LSE [H, N]. TILES is `Segments.tiles`."""
    tile, head = TILES + tl.program_id(0) * 8, tl.program_id(1)
    first, start, end = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    before, before_end = tl.load(tile + 3), tl.load(tile + 4)
    kv_head = head // (heads // kv_heads)
    queries = first + tl.arange(0, BM)
    valid = queries < end
    q = _load(Q, queries, valid, head, heads, D)
    total, largest = tl.zeros((BM,), tl.float32), tl.full((BM,), float("-inf"), tl.float32)
    out = tl.zeros((BM, D), tl.float32)
    for block in range(before, before_end, BN):
        tokens = block + tl.arange(0, BN)
        total, largest, out = _attend_block(
            q, K, V, tokens, tokens < before_end, queries, kv_head, kv_heads, scale, total, largest, out, D, False, True
        )  # fmt: skip
    for block in range(start, first, BN):  # whole blocks, since BN divides BM
        tokens = block + tl.arange(0, BN)
        total, largest, out = _attend_block(
            q, K, V, tokens, tokens < end, queries, kv_head, kv_heads, scale, total, largest, out, D, False, False
        )  # fmt: skip
    for block in range(first, tl.minimum(first + BM, end), BN):
        tokens = block + tl.arange(0, BN)
        total, largest, out = _attend_block(
            q, K, V, tokens, tokens < end, queries, kv_head, kv_heads, scale, total, largest, out, D, True, True
        )  # fmt: skip
    at = (queries.to(tl.int64) * heads + head)[:, None] * D + tl.arange(0, D)[None, :]
    tl.store(OUT + at, (out / total[:, None]).to(OUT.dtype.element_ty), mask=valid[:, None])
    tl.store(LSE + queries.to(tl.int64) + head * num_tokens, largest + tl.math.log2(total), mask=valid)


@triton.jit
def _query_block(
    q, do, K, V, lse, delta, tokens, inside, queries, kv_head, kv_heads, scale, dq,
    D: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    k = _load(K, tokens, inside, kv_head, kv_heads, D, MASKED)
    v = _load(V, tokens, inside, kv_head, kv_heads, D, MASKED)
    p = tl.math.exp2(tl.dot(q, tl.trans(k)) * scale - lse[:, None])
    if CAUSAL:
        p = tl.where(queries[:, None] >= tokens[None, :], p, 0.0)
    elif MASKED:
        p = tl.where(inside[None, :], p, 0.0)
    ds = p * (tl.dot(do, tl.trans(v)) - delta[:, None])
    return dq + tl.dot(ds.to(k.dtype), k)


@triton.jit(do_not_specialize=["num_tokens"])
def query_gradient(
    Q, K, V, OUT, DOUT, LSE, DELTA, DQ, TILES, scale, factor, num_tokens, heads, kv_heads,
    D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """DQ [N, H, D], and DELTA [H, N], the product of output and its gradient at each query. `factor` is the scale of the scores."""
    tile, head = TILES + tl.program_id(0) * 8, tl.program_id(1)
    first, start, end = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    before, before_end = tl.load(tile + 3), tl.load(tile + 4)
    kv_head = head // (heads // kv_heads)
    queries = first + tl.arange(0, BM)
    valid = queries < end
    q = _load(Q, queries, valid, head, heads, D)
    do = _load(DOUT, queries, valid, head, heads, D)
    out = _load(OUT, queries, valid, head, heads, D)
    delta = tl.sum(do.to(tl.float32) * out.to(tl.float32), 1)
    row = queries.to(tl.int64) + head * num_tokens
    tl.store(DELTA + row, delta, mask=valid)
    lse = tl.load(LSE + row, mask=valid, other=0.0)
    dq = tl.zeros((BM, D), tl.float32)
    for block in range(before, before_end, BN):
        tokens = block + tl.arange(0, BN)
        dq = _query_block(
            q, do, K, V, lse, delta, tokens, tokens < before_end, queries, kv_head, kv_heads, scale, dq, D, False, True
        )
    for block in range(start, first, BN):
        tokens = block + tl.arange(0, BN)
        dq = _query_block(q, do, K, V, lse, delta, tokens, tokens < end, queries, kv_head, kv_heads, scale, dq, D, False, False)
    for block in range(first, tl.minimum(first + BM, end), BN):
        tokens = block + tl.arange(0, BN)
        dq = _query_block(q, do, K, V, lse, delta, tokens, tokens < end, queries, kv_head, kv_heads, scale, dq, D, True, True)
    at = (queries.to(tl.int64) * heads + head)[:, None] * D + tl.arange(0, D)[None, :]
    tl.store(DQ + at, (dq * factor).to(DQ.dtype.element_ty), mask=valid[:, None])


@triton.jit
def _key_block(
    k, v, Q, DOUT, LSE, DELTA, queries, valid, tokens, head, heads, num_tokens, scale, dk, dv, D: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    q = _load(Q, queries, valid, head, heads, D)
    do = _load(DOUT, queries, valid, head, heads, D)
    row = queries.to(tl.int64) + head * num_tokens
    lse = tl.load(LSE + row, mask=valid, other=float("inf"))  # no probability where there is no query
    p = tl.math.exp2(tl.dot(k, tl.trans(q)) * scale - lse[None, :])  # [keys, queries]
    if CAUSAL:
        p = tl.where(queries[None, :] >= tokens[:, None], p, 0.0)
    dv += tl.dot(p.to(do.dtype), do)
    delta = tl.load(DELTA + row, mask=valid, other=0.0)
    ds = p * (tl.dot(v, tl.trans(do)) - delta[None, :])
    return dk + tl.dot(ds.to(q.dtype), q), dv


@triton.jit(do_not_specialize=["num_tokens", "num_shared"])
def shared_key_gradient(
    Q, K, V, DOUT, LSE, DELTA, PARTS, TILES, scale, num_tokens, num_shared, heads, kv_heads,
    D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """PARTS [H, 2, shared tokens, D]: what the queries of one head, in the segments after, add to the gradients of shared keys and
    values. A shared segment has many more queries than others: the heads of a key are apart, and `key_gradient` adds them up."""
    tile, head = TILES + tl.program_id(0) * 8, tl.program_id(1)
    first, end = tl.load(tile), tl.load(tile + 2)
    after, after_end = tl.load(tile + 5), tl.load(tile + 6)
    kv_head = head // (heads // kv_heads)
    tokens = first + tl.arange(0, BN)
    inside = tokens < end
    k = _load(K, tokens, inside, kv_head, kv_heads, D)
    v = _load(V, tokens, inside, kv_head, kv_heads, D)
    dk, dv = tl.zeros((BN, D), tl.float32), tl.zeros((BN, D), tl.float32)
    for block in range(after, after_end, BM):
        queries = block + tl.arange(0, BM)
        dk, dv = _key_block(
            k, v, Q, DOUT, LSE, DELTA, queries, queries < after_end, tokens, head, heads, num_tokens, scale, dk, dv, D, False
        )  # fmt: skip
    at = (head * 2 * num_shared + tokens.to(tl.int64))[:, None] * D + tl.arange(0, D)[None, :]
    tl.store(PARTS + at, dk, mask=inside[:, None])
    tl.store(PARTS + at + num_shared * D, dv, mask=inside[:, None])


@triton.jit(do_not_specialize=["num_tokens", "num_shared"])
def key_gradient(
    Q, K, V, DOUT, LSE, DELTA, PARTS, DK, DV, TILES, scale, factor, num_tokens, num_shared, heads, kv_heads,
    D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """DK and DV [N, K, D]."""
    tile, kv_head = TILES + tl.program_id(0) * 8, tl.program_id(1)
    first, end = tl.load(tile), tl.load(tile + 2)
    tokens = first + tl.arange(0, BN)
    inside = tokens < end
    k = _load(K, tokens, inside, kv_head, kv_heads, D)
    v = _load(V, tokens, inside, kv_head, kv_heads, D)
    dk, dv = tl.zeros((BN, D), tl.float32), tl.zeros((BN, D), tl.float32)
    group = heads // kv_heads
    for head in range(kv_head * group, kv_head * group + group):
        if first < num_shared:
            at = (head * 2 * num_shared + tokens.to(tl.int64))[:, None] * D + tl.arange(0, D)[None, :]
            dk += tl.load(PARTS + at, mask=inside[:, None], other=0.0)
            dv += tl.load(PARTS + at + num_shared * D, mask=inside[:, None], other=0.0)
        for block in range(first, tl.minimum(first + BN, end), BM):
            queries = block + tl.arange(0, BM)
            dk, dv = _key_block(
                k, v, Q, DOUT, LSE, DELTA, queries, queries < end, tokens, head, heads, num_tokens, scale, dk, dv, D, True
            )  # fmt: skip
        for block in range(first + BN, end, BM):
            queries = block + tl.arange(0, BM)
            dk, dv = _key_block(
                k, v, Q, DOUT, LSE, DELTA, queries, queries < end, tokens, head, heads, num_tokens, scale, dk, dv, D, False
            )  # fmt: skip
    at = (tokens.to(tl.int64) * kv_heads + kv_head)[:, None] * D + tl.arange(0, D)[None, :]
    tl.store(DK + at, (dk * factor).to(DK.dtype.element_ty), mask=inside[:, None])
    tl.store(DV + at, dv.to(DV.dtype.element_ty), mask=inside[:, None])
