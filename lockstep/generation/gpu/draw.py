# mypy: disable-error-code="no-untyped-def"
# (Triton kernels take no Python types.)
"""Draw tokens on the device: inverse CDF in two levels, the token's log-prob, and the bookkeeping of its row, in two kernels.

The rule and the random number are those of `rollout/sampling.py`: the token is the first whose cumulative probability, in the order of
the vocabulary, passes the uniform number of (request key, place in the response). The sum is taken in another order (chunks of 4,096), so
a uniform within rounding of a border may fall on its other side; nothing depends on the other rows.

`filters.py` says which tokens may be drawn where not all may.
"""

import triton
import triton.language as tl
from torch import Tensor

from lockstep.generation.gpu.filters import Filter, FilteredLogits, chunk_sums, keep
from lockstep.generation.gpu.rows import RING, RowState


def chunk_size(vocabulary: int) -> int:
    """How many logits one program sums up."""
    return min(4096, triton.next_power_of_2(vocabulary))


def num_chunks(vocabulary: int) -> int:
    """How many numbers per row `draw` needs as scratch, twice."""
    return triton.cdiv(vocabulary, chunk_size(vocabulary))


def draw(logits: Tensor, rows: RowState, first: int, kind: Filter | None = None) -> None:
    """One token for each of the rows `first`..., from `logits` [count, vocabulary] float32; writes it into `rows`.

    With a filter the token is drawn from what it keeps, and its log-prob stays that of the whole distribution.
    """
    count, vocabulary = logits.shape
    assert logits.stride(1) == 1
    chunk = chunk_size(vocabulary)
    chunks = num_chunks(vocabulary)
    if kind is None:
        chunk_sums[(count, chunks)](
            logits, rows.chunk_max, rows.chunk_sum, rows.inverse_temperature, vocabulary, logits.stride(0), chunks, first,
            CHUNK=chunk, num_warps=4,
        )  # fmt: skip
        kept = FilteredLogits(logits, rows.chunk_max, rows.chunk_max, rows.chunk_sum)
    else:
        kept = keep(logits, rows, first, kind, chunk)
    _pick[(count,)](
        kept.logits, logits, kept.cut, rows.chunk_max, rows.chunk_sum, kept.chunk_max, kept.chunk_sum, rows.inverse_temperature,
        rows.greedy, rows.stop, rows.stops, rows.key, rows.position, rows.limit, rows.token, rows.context, rows.generated, rows.done,
        rows.out_tokens, rows.out_log_probs, vocabulary, kept.logits.stride(0), logits.stride(0), chunks, first,
        CHUNK=chunk, CHUNKS=triton.next_power_of_2(chunks), WIDTH=RING, FILTERED=kind is not None,
        CUTS=kind is not None and kind.truncates, SCALED=kind is not None and kind.penalises, num_warps=8,
    )  # fmt: skip


def keep_top(logits: Tensor, rows: RowState, first: int) -> None:
    """Write the most likely tokens of the rows `first`... into `rows`, where `draw`, which comes after it, writes theirs."""
    assert rows.top_ids is not None
    assert rows.top_log_probs is not None
    here = slice(first, first + len(logits))
    scaled = logits * rows.option("inverse_temperature", here)
    values, ids = scaled.topk(rows.top_ids.shape[2], -1)
    place = (rows.generated[here] % RING).long()[:, None, None].expand(-1, 1, ids.shape[1])
    rows.top_ids[here].scatter_(1, place, ids[:, None].int())
    rows.top_log_probs[here].scatter_(1, place, (values - scaled.logsumexp(-1, keepdim=True))[:, None])


@triton.jit
def _mix(x):
    """The finaliser of SplitMix64; `x` is unsigned, so shifts fill with zeros and products wrap."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _uniform(key, position):
    """`sampling.uniforms` for one token."""
    bits = _mix(_mix(key.to(tl.uint64, bitcast=True) + 0x9E3779B97F4A7C15) ^ position.to(tl.uint64))
    return (bits >> 40).to(tl.int32).to(tl.float32) / 16777216.0


@triton.jit
def _masses(MAX, SUM, chunks, CHUNKS: tl.constexpr):
    """The largest logit of each chunk, its mass relative to the row's largest; the row's largest, and the sum of the masses."""
    c = tl.arange(0, CHUNKS)
    chunk_max = tl.load(MAX + c, mask=c < chunks, other=float("-inf"))
    chunk_sum = tl.load(SUM + c, mask=c < chunks, other=0.0)
    peak = tl.max(chunk_max, 0)
    mass = tl.where(chunk_max == float("-inf"), chunk_sum, chunk_sum * tl.exp(chunk_max - peak))  # keeps a NaN sum
    mass = tl.where((chunk_max == float("-inf")) & (mass == mass), 0.0, mass)
    return chunk_max, mass, peak, tl.sum(mass, 0)


@triton.jit(do_not_specialize=["first"])
def _pick(
    X, RAW, CUT, RAW_MAX, RAW_SUM, MAX, SUM, INVERSE_T, GREEDY, STOP, STOPS, KEY, POSITION, LIMIT, TOKEN, CONTEXT, GENERATED, DONE,
    OUT_TOKEN, OUT_LOG_PROB,
    vocabulary, stride_x, stride_raw, chunks, first,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, WIDTH: tl.constexpr, FILTERED: tl.constexpr, CUTS: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    line = tl.program_id(0).to(tl.int64)
    row = line + first
    done = tl.load(DONE + row)
    generated = tl.load(GENERATED + row)
    inverse_t = tl.load(INVERSE_T + row)
    greedy = tl.load(GREEDY + row) != 0

    c = tl.arange(0, CHUNKS)
    chunk_max, mass, peak, total = _masses(MAX + line * chunks, SUM + line * chunks, chunks, CHUNKS)
    threshold = _uniform(tl.load(KEY + row), generated + tl.load(POSITION + row)) * total

    # The chunk: the first whose cumulative mass passes the threshold; the last with any mass where rounding lets none pass.
    passed = (tl.cumsum(mass, 0) > threshold) & (mass > 0)
    chunk = tl.min(tl.where(passed, c, CHUNKS), 0)
    chunk = tl.where(chunk == CHUNKS, tl.max(tl.where(mass > 0, c, 0), 0), chunk)
    chunk = tl.where(greedy, tl.min(tl.where(chunk_max == peak, c, CHUNKS - 1), 0), chunk)
    rest = tl.maximum(threshold - tl.sum(tl.where(c < chunk, mass, 0.0), 0), 0.0)

    # The token inside it, by the same rule.
    t = tl.arange(0, CHUNK)
    i = chunk * CHUNK + t
    x = tl.load(X + line * stride_x + i, mask=i < vocabulary, other=float("-inf"))
    if not SCALED:
        x *= inverse_t
    e = tl.exp(x - peak)
    if CUTS:
        e = tl.where(x < tl.load(CUT + line), 0.0, e)
    passed = (tl.cumsum(e, 0) > rest) & (e > 0)
    token = tl.min(tl.where(passed, t, CHUNK), 0)
    token = tl.where(token == CHUNK, tl.max(tl.where(e > 0, t, 0), 0), token)
    token = tl.where(greedy, tl.min(tl.where(x == peak, t, CHUNK - 1), 0), token)
    token = tl.minimum(chunk * CHUNK + token, vocabulary - 1)
    log_prob = tl.load(RAW + line * stride_raw + token) * inverse_t
    if FILTERED:
        _, _, peak, total = _masses(RAW_MAX + line * chunks, RAW_SUM + line * chunks, chunks, CHUNKS)
    log_prob -= peak + tl.log(total)

    live = done == 0
    finite = (log_prob == log_prob) & (log_prob > float("-inf")) & (log_prob < float("inf"))
    state = tl.where(generated + 1 >= tl.load(LIMIT + row), 2, 0)
    state = tl.where((tl.load(STOP + token) != 0) & (tl.load(STOPS + row) != 0), 1, state)
    state = tl.where(finite, state, 3)
    place = row * WIDTH + generated % WIDTH
    tl.store(OUT_TOKEN + place, token, mask=live)
    tl.store(OUT_LOG_PROB + place, log_prob, mask=live)
    tl.store(TOKEN + row, token.to(tl.int64), mask=live)
    tl.store(CONTEXT + row, tl.load(CONTEXT + row) + 1, mask=live)
    tl.store(GENERATED + row, generated + 1, mask=live)
    tl.store(DONE + row, state, mask=live)
