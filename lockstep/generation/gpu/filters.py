# mypy: disable-error-code="no-untyped-def"
# (Triton kernels take no Python types.)
"""Which tokens may be drawn: penalties, top-k, top-p and min-p without a sort, by the definition of `sampling.keep_likely`.

Penalties change the logits one by one, in the pass that sums them up. Top-k, top-p and min-p each keep the tokens at or above a number;
`_cut` finds the largest of the three, one program a row, with parameters of its own. Top-k and top-p ask for the least number such that
the tokens above it count, or weigh, less than a limit:

1. a walk over the vocabulary takes the sums above 7 numbers, which leaves the answer between two of them; again, where too many tokens
   lie between;
2. a walk collects the tokens near the place where a straight line between the two sums passes the limit, and checks by exact sums that
   the answer is among them (otherwise back to 1, between closer bounds, by the bits of the numbers in the end);
3. the tokens that were collected are halved in registers until one number is left.

For top-p, step 1 first looks at every eighth chunk alone (`_guess`): where the distribution is flat that is near enough for step 2.

Sums are taken in the same order in every batch. They are monotone in the tokens that they cover, as additions of floats are, so that each
step leaves the answer where the sums say it is.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lockstep.config.sampling import SamplingParams
from lockstep.generation.gpu.rows import FLOATS, INTS, RUNNING, RowState

_COLLECTED = 4096
"""Tokens that are halved in registers at most."""
_ROUNDS = 24
"""Walks of kind 1 and 2 at most; seldom more than 3. By the bits 11 of kind 1 end the search."""


_LINES = 4
_WARPS = 8
_SAMPLE = 8
"""Where a vocabulary is long enough, every such chunk of it is looked at first."""


class Filter(NamedTuple):
    """What the rows of a step need besides a plain draw. Rows have numbers of their own: see `RowState.floats`."""

    penalises: bool
    truncates: bool


def make_filter(*sampling: SamplingParams) -> Filter | None:
    """The filter of rows with these parameters; None where every token may be drawn as it is likely."""
    penalises = any(params.penalises for params in sampling)
    # At temperature 0 the most likely token is taken, which no truncation drops.
    truncates = any(params.truncates and params.temperature for params in sampling)
    return Filter(penalises, truncates) if penalises or truncates else None


def note_tokens(rows: RowState, first: int, count: int) -> None:
    """The last tokens of the rows `first`... are among those that penalties act on. Called once for each token, before the next."""
    assert rows.seen is not None, "penalties need the tokens so far"
    assert rows.counts is not None
    here = slice(first, first + count)
    token = rows.token[here, None]
    rows.seen[here].scatter_(1, token, True)
    # A row that has ended, or is only warming up, does not count its token again.
    rows.counts[here].scatter_add_(1, token, (rows.done[here, None] == RUNNING).short())


class FilteredLogits(NamedTuple):
    """What a draw from the tokens that are left needs."""

    logits: Tensor
    """[count, vocabulary]: penalised, at the temperature; or the model's own."""
    cut: Tensor
    """[count]: the smallest number at the temperature that may be drawn."""
    chunk_max: Tensor
    """[count, chunks], as RowState.chunk_max, of these logits."""
    chunk_sum: Tensor
    """[count, chunks], of the tokens that are left."""


def keep(logits: Tensor, rows: RowState, first: int, kind: Filter, chunk: int) -> FilteredLogits:
    """What of `logits` [count, vocabulary] may be drawn by the rows `first`... Writes RowState.chunk_max and chunk_sum of all of it."""
    count, vocabulary = logits.shape
    chunks = triton.cdiv(vocabulary, chunk)
    source = logits
    chunk_max = rows.chunk_max
    chunk_sum = rows.chunk_sum
    if kind.penalises:
        assert rows.seen is not None, "penalties need the tokens so far"
        assert rows.counts is not None
        source = torch.empty_like(logits)
        chunk_max, chunk_sum = torch.empty(2, count, chunks, device=logits.device)
        _penalise[(count, chunks)](
            logits, source, rows.seen, rows.counts, rows.chunk_max, rows.chunk_sum, chunk_max, chunk_sum, rows.inverse_temperature,
            *(rows.floats[FLOATS.index(name)] for name in ("repetition_penalty", "presence_penalty", "frequency_penalty")),
            vocabulary, logits.stride(0), source.stride(0), rows.seen.stride(0), chunks, first, CHUNK=chunk, num_warps=4,
        )  # fmt: skip
    else:
        chunk_sums[(count, chunks)](
            logits, rows.chunk_max, rows.chunk_sum, rows.inverse_temperature, vocabulary, logits.stride(0), chunks, first,
            CHUNK=chunk, num_warps=4,
        )  # fmt: skip
    cut = torch.empty(count, device=logits.device)
    if not kind.truncates:
        return FilteredLogits(source, cut, chunk_max, chunk_sum)
    block = max(1, chunk // _LINES)  # a sample is of whole chunks, whose sums are known
    kept_sum = torch.empty_like(chunk_sum)
    collected = torch.empty(count, _COLLECTED, device=logits.device)
    parameters = (rows.ints[INTS.index("top_k")], rows.floats[FLOATS.index("top_p")], rows.floats[FLOATS.index("min_p")])
    _cut[(count,)](
        source, chunk_max, chunk_sum, rows.inverse_temperature, *parameters, collected, cut, vocabulary, source.stride(0), chunks, first,
        SCALED=kind.penalises, CHUNKS=triton.next_power_of_2(chunks), COLLECTED=_COLLECTED, ROUNDS=_ROUNDS,
        LINES=_LINES, BLOCK=block, SAMPLE=_SAMPLE if chunks >= 2 * _SAMPLE else 1, num_warps=_WARPS,
    )  # fmt: skip
    _kept_sums[(count, chunks)](
        source, chunk_max, kept_sum, cut, rows.inverse_temperature, vocabulary, source.stride(0), chunks, first,
        SCALED=kind.penalises, CHUNK=chunk, num_warps=4,
    )  # fmt: skip
    return FilteredLogits(source, cut, chunk_max, kept_sum)


@triton.jit
def _sum_up(x, MAX, SUM):
    """The largest of `x`, and the sum of their exponentials less it."""
    peak = tl.max(x, 0)
    safe = tl.where(peak == float("-inf"), 0.0, peak)
    tl.store(MAX, peak)
    tl.store(SUM, tl.sum(tl.exp(x - safe), 0))  # NaN when one of x is NaN or +inf


@triton.jit(do_not_specialize=["first"])
def chunk_sums(X, MAX, SUM, INVERSE_T, vocabulary, stride_x, chunks, first, CHUNK: tl.constexpr):
    """RowState.chunk_max and chunk_sum, one program a chunk."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    i = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(X + row * stride_x + i, mask=i < vocabulary, other=float("-inf")) * tl.load(INVERSE_T + row + first)
    _sum_up(x, MAX + row * chunks + chunk, SUM + row * chunks + chunk)


@triton.jit(do_not_specialize=["first"])
def _penalise(
    X, Y, SEEN, COUNTS, MAX, SUM, PENALISED_MAX, PENALISED_SUM, INVERSE_T, REPETITION, PRESENCE, FREQUENCY,
    vocabulary, stride_x, stride_y, stride_seen, chunks, first, CHUNK: tl.constexpr,
):  # fmt: skip
    """`chunk_sums`, and the same of the penalised logits at the temperature, which go to Y."""
    line = tl.program_id(0).to(tl.int64)
    row = line + first
    chunk = tl.program_id(1)
    i = chunk * CHUNK + tl.arange(0, CHUNK)
    inverse_t = tl.load(INVERSE_T + row)
    x = tl.load(X + line * stride_x + i, mask=i < vocabulary, other=float("-inf")) * inverse_t
    _sum_up(x, MAX + line * chunks + chunk, SUM + line * chunks + chunk)
    seen = tl.load(SEEN + row * stride_seen + i, mask=i < vocabulary, other=0) != 0
    count = tl.load(COUNTS + row * stride_seen + i, mask=i < vocabulary, other=0).to(tl.float32)
    penalty = tl.load(REPETITION + row)
    y = tl.where(seen, tl.where(x > 0, x / penalty, x * penalty), x)
    lowered = tl.where(count > 0, tl.load(PRESENCE + row), 0.0) + tl.load(FREQUENCY + row) * count
    y -= lowered * inverse_t
    tl.store(Y + line * stride_y + i, y, mask=i < vocabulary)
    _sum_up(y, PENALISED_MAX + line * chunks + chunk, PENALISED_SUM + line * chunks + chunk)


@triton.jit(do_not_specialize=["first"])
def _kept_sums(X, MAX, SUM, CUT, INVERSE_T, vocabulary, stride_x, chunks, first, SCALED: tl.constexpr, CHUNK: tl.constexpr):
    """The sums of the tokens at or above the cut, each relative to its chunk's largest of all."""
    line = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    i = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(X + line * stride_x + i, mask=i < vocabulary, other=float("-inf"))
    if not SCALED:
        x *= tl.load(INVERSE_T + line + first)
    peak = tl.load(MAX + line * chunks + chunk)
    safe = tl.where(peak == float("-inf"), 0.0, peak)
    # A NaN is not below the cut, and stays NaN.
    tl.store(SUM + line * chunks + chunk, tl.sum(tl.where(x < tl.load(CUT + line), 0.0, tl.exp(x - safe)), 0))


@triton.jit
def _order(x):
    """The bits of a float, made so that they have the order of the numbers."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def _float(order):
    bits = order.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _weigh(x, peak, floor, COUNTS: tl.constexpr):
    """What a token counts for: 1 for top-k; its share of the likeliest one's probability for top-p, where top-k keeps it."""
    if COUNTS:
        return tl.full(x.shape, 1.0, tl.float32)
    else:
        return tl.where(x >= floor, tl.exp(x - peak), 0.0)


@triton.jit
def _narrow(low, at_low, high, at_high, t, at_t, limit):
    """The bounds of the answer when the tokens above `t` weigh `at_t`."""
    falls = at_t < limit
    lowers, lifts = falls & (t < high), (at_t >= limit) & (t > low)
    return tl.where(lifts, t, low), tl.where(lifts, at_t, at_low), tl.where(lowers, t, high), tl.where(lowers, at_t, at_high)


@triton.jit
def _walk(
    X, vocabulary, scale, peak, floor, limit, low, at_low, high, at_high, t1, t2, t3, t4, t5, t6, t7,
    COUNTS: tl.constexpr, STEP: tl.constexpr, LINES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The bounds after a look at the sums above 7 numbers, over every STEP-th block of the vocabulary."""
    s1 = tl.zeros([BLOCK], tl.float32)
    s2, s3, s4, s5, s6, s7 = s1, s1, s1, s1, s1, s1
    for start in range(0, vocabulary, STEP * LINES * BLOCK):
        i = start + tl.arange(0, LINES)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
        x = tl.load(X + i, mask=i < vocabulary, other=float("-inf")) * scale
        w = _weigh(x, peak, floor, COUNTS)
        s1 += tl.sum(tl.where(x > t1, w, 0.0), 0)
        s2 += tl.sum(tl.where(x > t2, w, 0.0), 0)
        s3 += tl.sum(tl.where(x > t3, w, 0.0), 0)
        s4 += tl.sum(tl.where(x > t4, w, 0.0), 0)
        s5 += tl.sum(tl.where(x > t5, w, 0.0), 0)
        s6 += tl.sum(tl.where(x > t6, w, 0.0), 0)
        s7 += tl.sum(tl.where(x > t7, w, 0.0), 0)
    low, at_low, high, at_high = _narrow(low, at_low, high, at_high, t1, tl.sum(s1, 0), limit)
    low, at_low, high, at_high = _narrow(low, at_low, high, at_high, t2, tl.sum(s2, 0), limit)
    low, at_low, high, at_high = _narrow(low, at_low, high, at_high, t3, tl.sum(s3, 0), limit)
    low, at_low, high, at_high = _narrow(low, at_low, high, at_high, t4, tl.sum(s4, 0), limit)
    low, at_low, high, at_high = _narrow(low, at_low, high, at_high, t5, tl.sum(s5, 0), limit)
    low, at_low, high, at_high = _narrow(low, at_low, high, at_high, t6, tl.sum(s6, 0), limit)
    return _narrow(low, at_low, high, at_high, t7, tl.sum(s7, 0), limit)


@triton.jit
def _inside(low, high, eighths, turn):
    """A number so many eighths below `high`: of the distance, or, when that has not led to an end soon, of the numbers between."""
    by_bits = _order(high) - (_order(high) - _order(low)) * eighths // 8
    return tl.where(turn < 4, high - (high - low) * (eighths * 0.125), _float(by_bits))


@triton.jit
def _collect(
    X, HELD, vocabulary, scale, peak, floor, above, upto,
    COUNTS: tl.constexpr, COLLECTED: tl.constexpr, LINES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the tokens in (above, upto] to HELD, always in the same order. Returns how many they are, and the sums above the bounds."""
    number = 0
    over, beyond = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    tl.debug_barrier()  # what HELD had has been read
    for start in range(0, vocabulary, LINES * BLOCK):
        i = start + tl.arange(0, LINES)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
        x = tl.load(X + i, mask=i < vocabulary, other=float("-inf")) * scale
        w = _weigh(x, peak, floor, COUNTS)
        over += tl.sum(tl.where(x > above, w, 0.0), 0)
        beyond += tl.sum(tl.where(x > upto, w, 0.0), 0)
        inside = ((x > above) & (x <= upto) & (x >= floor)).to(tl.int32)
        column = tl.sum(inside, 0)
        before = tl.cumsum(column, 0) - column
        place = number + before[None, :] + tl.cumsum(inside, 0) - 1
        tl.store(HELD + place, x, mask=(inside != 0) & (place < COLLECTED))
        number += tl.sum(column, 0)
    tl.debug_barrier()
    return number, tl.sum(over, 0), tl.sum(beyond, 0)


@triton.jit
def _halve(HELD, number, peak, floor, limit, before, low, high, COUNTS: tl.constexpr, COLLECTED: tl.constexpr):
    """The answer in (low, high], which HELD has all tokens of; those above `high` weigh `before`."""
    i = tl.arange(0, COLLECTED)
    x = tl.load(HELD + i, mask=i < number, other=float("-inf"))
    w = _weigh(x, peak, floor, COUNTS)
    under, upper = _order(low), _order(high)
    while upper - under > 1:
        middle = under + (upper - under) // 2
        falls = before + tl.sum(tl.where(x > _float(middle), w, 0.0), 0) < limit
        under, upper = tl.where(falls, under, middle), tl.where(falls, middle, upper)
    return _float(upper)


@triton.jit
def _search(
    X,
    HELD,
    vocabulary,
    scale,
    peak,
    floor,
    limit,
    COUNTS: tl.constexpr,
    COLLECTED: tl.constexpr,
    ROUNDS: tl.constexpr,
    LINES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The least number such that the tokens above it weigh less than `limit`, and how many tokens HELD has if it has all above it.

    What lies under the likeliest by 104 or more has no weight in float32: an answer there is minus infinity.
    """
    low, at_low, high, at_high = _walk(
        X, vocabulary, scale, peak, floor, limit, peak * 0.0 + float("-inf"), peak * 0.0 + float("inf"), peak, peak * 0.0,
        peak - 0.5, peak - 1.0, peak - 2.0, peak - 4.0, peak - 8.0, peak - 24.0, peak - 104.0,
        COUNTS, 1, LINES, BLOCK,
    )  # fmt: skip
    cut, held, turn, walked = low, 0, 1, 0
    searches = low > float("-inf")
    while searches:
        between = at_low - at_high
        if not COUNTS:
            between = between * tl.exp(peak - low) * 1.001 + 1.0  # each weighs what `low` does, or more
        if (between <= COLLECTED) | (walked != 0):
            centre, reach = (
                high - (high - low) * (limit - at_high) / (at_low - at_high),
                (high - low) * (0.25 * COLLECTED) / between,
            )
            above = tl.where(between <= COLLECTED, low, tl.maximum(low, centre - reach))
            upto = tl.where(between <= COLLECTED, high, tl.minimum(high, centre + reach))
            whole = (at_low <= COLLECTED) & COUNTS
            if whole:
                above, upto = low, float("inf") + peak * 0.0
            number, over, beyond = _collect(X, HELD, vocabulary, scale, peak, floor, above, upto, COUNTS, COLLECTED, LINES, BLOCK)
            if (number <= COLLECTED) & (over >= limit) & (beyond < limit):
                high = _halve(HELD, number, peak, floor, limit, beyond, above, tl.minimum(upto, high), COUNTS, COLLECTED)
                low = high
                held = tl.where(whole, number, 0)
            else:
                low, at_low, high, at_high = _narrow(low, at_low, high, at_high, above, over, limit)
                low, at_low, high, at_high = _narrow(low, at_low, high, at_high, upto, beyond, limit)
            walked = 0
        else:
            low, at_low, high, at_high = _walk(
                X, vocabulary, scale, peak, floor, limit, low, at_low, high, at_high,
                _inside(low, high, 1, turn), _inside(low, high, 2, turn), _inside(low, high, 3, turn), _inside(low, high, 4, turn),
                _inside(low, high, 5, turn), _inside(low, high, 6, turn), _inside(low, high, 7, turn),
                COUNTS, 1, LINES, BLOCK,
            )  # fmt: skip
            walked = 1
        cut = high
        turn += 1
        searches = (turn < ROUNDS) & (_order(high) - _order(low) > 1)
    return cut, held


@triton.jit
def _guess(
    X, HELD, vocabulary, scale, peak, floor, limit, total, sampled,
    COLLECTED: tl.constexpr, LINES: tl.constexpr, BLOCK: tl.constexpr, SAMPLE: tl.constexpr,
):  # fmt: skip
    """`_search` for top-p where the distribution is flat: a sample of the vocabulary says where the answer is about, and one walk over
    all of it collects the tokens there and checks that it is among them. Returns it, and whether it is.

    All tokens weigh `total`, those of the sample `sampled`. What is estimated is what lies below the answer: many tokens of little
    weight, of which a sample says more than of the few that weigh much.
    """
    visited = tl.cdiv(vocabulary, SAMPLE * LINES * BLOCK)
    last = tl.minimum(vocabulary - (visited - 1) * SAMPLE * LINES * BLOCK, LINES * BLOCK)
    times = vocabulary / ((visited - 1) * LINES * BLOCK + last).to(tl.float32)
    part = sampled - (total - limit) / times
    low, at_low, high, at_high = _walk(
        X, vocabulary, scale, peak, floor, part, peak * 0.0 + float("-inf"), peak * 0.0 + float("inf"), peak, peak * 0.0,
        peak - 0.5, peak - 1.0, peak - 2.0, peak - 4.0, peak - 8.0, peak - 24.0, peak - 104.0,
        False, SAMPLE, LINES, BLOCK,
    )  # fmt: skip
    found, cut = 0, peak
    flat = (low > float("-inf")).to(tl.int32)
    walks = 0
    while (flat != 0) & (walks < 2):
        low, at_low, high, at_high = _walk(
            X, vocabulary, scale, peak, floor, part, low, at_low, high, at_high,
            _inside(low, high, 1, 0), _inside(low, high, 2, 0), _inside(low, high, 3, 0), _inside(low, high, 4, 0),
            _inside(low, high, 5, 0), _inside(low, high, 6, 0), _inside(low, high, 7, 0),
            False, SAMPLE, LINES, BLOCK,
        )  # fmt: skip
        between = (at_low - at_high) * times * tl.exp(peak - 0.5 * (low + high))  # tokens, about
        if walks == 0:
            flat = (between > COLLECTED).to(tl.int32)
        walks += 1
    if flat != 0:
        centre = high - (high - low) * (part - at_high) / (at_low - at_high)
        reach = (high - low) * (0.4 * COLLECTED) / ((at_low - at_high) * times * tl.exp(peak - 0.5 * (low + high)))
        above, upto = centre - reach, tl.minimum(centre + reach, peak)
        number, over, beyond = _collect(X, HELD, vocabulary, scale, peak, floor, above, upto, False, COLLECTED, LINES, BLOCK)
        if (number <= COLLECTED) & (over >= limit) & (beyond < limit):
            cut = _halve(HELD, number, peak, floor, limit, beyond, above, upto, False, COLLECTED)
            found = 1
    return cut, found


@triton.jit(do_not_specialize=["first"])
def _cut(
    X, MAX, SUM, INVERSE_T, TOP_K, TOP_P, MIN_P, HELD, CUT, vocabulary, stride_x, chunks, first,
    SCALED: tl.constexpr, CHUNKS: tl.constexpr, COLLECTED: tl.constexpr, ROUNDS: tl.constexpr, LINES: tl.constexpr,
    BLOCK: tl.constexpr, SAMPLE: tl.constexpr,
):  # fmt: skip
    """The smallest number that top-k, then top-p among what it keeps, then min-p keep, of one row."""
    line = tl.program_id(0).to(tl.int64)
    row = line + first
    X += line * stride_x
    HELD += line * COLLECTED
    scale = tl.load(INVERSE_T + row)
    if SCALED:
        scale = scale * 0.0 + 1.0
    c = tl.arange(0, CHUNKS)
    chunk_max = tl.load(MAX + line * chunks + c, mask=c < chunks, other=float("-inf"))
    chunk_sum = tl.load(SUM + line * chunks + c, mask=c < chunks, other=0.0)
    peak = tl.max(chunk_max, 0)
    mass = tl.where(chunk_max == float("-inf"), 0.0, chunk_sum * tl.exp(chunk_max - peak))
    total = tl.sum(mass, 0)
    top_k, top_p = tl.load(TOP_K + row), tl.load(TOP_P + row)
    cut, held, nothing = peak * 0.0 + float("-inf"), 0, peak * 0.0 + float("-inf")
    finite = (total == total) & (peak > float("-inf")) & (peak < float("inf"))
    if finite & (top_k > 0) & (top_k < vocabulary):
        cut, held = _search(X, HELD, vocabulary, scale, peak, nothing, top_k.to(tl.float32), True, COLLECTED, ROUNDS, LINES, BLOCK)
    if finite & (top_p < 1.0):
        # The least positive number instead of 0: the likeliest stay.
        if held > 0:
            i = tl.arange(0, COLLECTED)
            x = tl.load(HELD + i, mask=i < held, other=float("-inf"))
            limit = tl.maximum(top_p * tl.sum(_weigh(x, peak, cut, False), 0), 1e-30)
            below = _float(_order(cut) - 1)
            cut = _halve(HELD, held, peak, cut, limit, peak * 0.0, below, peak, False, COLLECTED)
        else:
            if cut > float("-inf"):
                total = _collect(X, HELD, vocabulary, scale, peak, cut, nothing, nothing, False, COLLECTED, LINES, BLOCK)[1]
            limit = tl.maximum(top_p * total, 1e-30)
            lowest, found = cut, 0
            if (SAMPLE > 1) & (cut == float("-inf")):
                sampled = tl.sum(tl.where(c % SAMPLE == 0, mass, 0.0), 0)
                lowest, found = _guess(
                    X, HELD, vocabulary, scale, peak, cut, limit, total, sampled, COLLECTED, LINES, BLOCK, SAMPLE
                )
            if found == 0:
                lowest = _search(X, HELD, vocabulary, scale, peak, cut, limit, False, COLLECTED, ROUNDS, LINES, BLOCK)[0]
            cut = tl.maximum(cut, lowest)
    tl.store(CUT + line, tl.maximum(cut, peak + tl.log(tl.load(MIN_P + row))))
