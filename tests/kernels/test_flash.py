"""The joining of two attention passes, forward and backward, with passes written out in plain float64 in the place of the kernels."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lockstep.kernels import flash, long_rows
from lockstep.kernels.flash import SegmentBounds
from lockstep.models.attention import PackedLayout


def parts(bounds: SegmentBounds) -> list[tuple[slice, slice]]:
    q, k = bounds.queries.tolist(), bounds.keys.tolist()
    assert bounds.longest_query == max(b - a for a, b in pairwise(q))
    assert bounds.longest_key == max(b - a for a, b in pairwise(k))
    return [(slice(*q[i : i + 2]), slice(*k[i : i + 2])) for i in range(len(q) - 1)]


def scores(query: Tensor, key: Tensor, causal: bool, scale: float, window: int | None) -> Tensor:
    """[H, n, m]"""
    key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    found = torch.einsum("qhd,khd->hqk", query, key) * scale
    distance = torch.arange(len(query))[:, None] - torch.arange(len(key))
    hidden = (distance < 0) if causal else torch.zeros_like(distance, dtype=torch.bool)
    if window is not None:
        hidden = hidden | (distance >= window)
    return found.masked_fill(hidden, -torch.inf)


def plain_forward(query, key, value, bounds, causal, scale, window):
    out, lse = torch.empty_like(query), torch.empty(query.shape[1], len(query), dtype=query.dtype)
    for q, k in parts(bounds):
        s = scores(query[q], key[k], causal, scale, window)
        lse[:, q] = torch.logsumexp(s, -1)
        out[q] = torch.einsum(
            "hqk,khd->qhd", torch.exp(s - lse[:, q, None]), value[k].repeat_interleave(query.shape[1] // key.shape[1], 1)
        )
    return out, lse


def plain_backward(grad, query, key, value, out, lse, bounds, causal, scale, window):
    """What a flash kernel does: probabilities from the given lse, the softmax's gradient from the given out."""
    dq, dk, dv = torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
    groups = query.shape[1] // key.shape[1]
    for q, k in parts(bounds):
        p = torch.exp(scores(query[q], key[k], causal, scale, window) - lse[:, q, None])
        dp = torch.einsum("qhd,khd->hqk", grad[q], value[k].repeat_interleave(groups, 1))
        ds = p * (dp - (grad[q] * out[q]).sum(-1).t()[:, :, None]) * scale
        dq[q] = torch.einsum("hqk,khd->qhd", ds, key[k].repeat_interleave(groups, 1))
        dk[k] = torch.einsum("hqk,qhd->khd", ds, query[q]).unflatten(1, (-1, groups)).sum(2)
        dv[k] = torch.einsum("hqk,qhd->khd", p, grad[q]).unflatten(1, (-1, groups)).sum(2)
    return dq, dk, dv


def alone(query: Tensor, key: Tensor, value: Tensor, layout: PackedLayout, scale: float, window: int | None) -> Tensor:
    """Each segment with what it continues, written out; autograd does the rest."""
    ends = layout.lengths.cumsum(0).tolist()
    places = [torch.arange(end - n, end) for end, n in zip(ends, layout.lengths.tolist(), strict=True)]
    outputs = []
    for i, own in enumerate(places):
        seen = (
            own
            if i < layout.num_shared or not layout.continued
            else torch.cat([places[layout.continued[i - layout.num_shared]], own])
        )
        s = scores(query[seen], key[seen], True, scale, window)
        value_heads = value[seen].repeat_interleave(query.shape[1] // key.shape[1], 1)
        outputs.append(torch.einsum("hqk,khd->qhd", s.softmax(-1), value_heads)[-len(own) :])
    return torch.cat(outputs)


def one(query: Tensor) -> SegmentBounds:
    return flash.own_bounds([len(query)], "cpu")


LAYOUTS = st.lists(st.tuples(st.integers(1, 4), st.lists(st.integers(1, 4), max_size=3)), min_size=1, max_size=3)


@settings(deadline=None, max_examples=30)
@given(
    groups=LAYOUTS,
    share=st.booleans(),
    window=st.none() | st.integers(1, 4),
    longest_packed=st.integers(0, 4),
    seed=st.integers(0, 99),
)
def test_the_joined_passes_equal_attention_written_out(
    groups: list[tuple[int, list[int]]], share: bool, window: int | None, longest_packed: int, seed: int
) -> None:
    """float64, so 1e-12; a window only where nothing is shared and no segment is computed alone."""
    if share and not any(responses for _, responses in groups):
        share = False
    window = None if share else window
    lengths = [p for p, _ in groups] + [t for _, responses in groups for t in responses]
    layout = PackedLayout(torch.tensor(lengths), followers=[len(r) for _, r in groups] if share else ())
    generator = torch.Generator().manual_seed(seed)
    tensors = [
        torch.randn(sum(lengths), heads, 3, generator=generator, dtype=torch.float64).requires_grad_() for heads in (4, 2, 2)
    ]
    weights = torch.randn(sum(lengths), 4, 3, generator=generator, dtype=torch.float64)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flash, "_forward", plain_forward)
        patch.setattr(flash, "_backward", plain_backward)
        patch.setattr(long_rows, "forward", lambda q, *rest: plain_forward(q, *rest[:-1], one(q), True, rest[-1], None))
        patch.setattr(long_rows, "backward", lambda g, q, *rest: plain_backward(g, q, *rest[:-1], one(q), True, rest[-1], None))
        own = flash.cut_runs(lengths, "cpu", longest_packed if window is None else 4)
        assert all(run.bounds is None or run.bounds.longest_query <= longest_packed for run in own) or window is not None
        assert [run.stop for run in own][:-1] == [run.start for run in own][1:]
        mine = flash.attend(*tensors, own, layout.shared, layout.num_shared_tokens, 0.7, window)
        mine_grads = torch.autograd.grad((mine * weights).sum(), tensors)
    want = alone(*tensors, layout, 0.7, window)
    want_grads = torch.autograd.grad((want * weights).sum(), tensors)
    for a, b in zip((mine, *mine_grads), (want, *want_grads), strict=True):
        torch.testing.assert_close(a, b, atol=1e-12, rtol=1e-12)


def test_a_cpu_has_no_flash_attention() -> None:
    half = torch.zeros(1, 8, dtype=torch.bfloat16)
    assert not flash.applies(half, half)


@pytest.mark.parametrize("length", [1, 17, 4096, 4097, 5000, 8191, 16_384, 16_385, 33_000, 131_072])
def test_a_long_row_is_filled_up_to_one_of_few_lengths(length: int) -> None:
    filled = long_rows.filled_length(length)
    assert length <= filled <= length * 33 / 32
    assert filled % max(1, 2 ** (length.bit_length() - 1) // 32) == 0
    assert filled == length or length & (length - 1)  # a power of 2 is one of them


def test_long_rows_fill_up_few_lengths_between_two_powers_of_2() -> None:
    assert len({long_rows.filled_length(length) for length in range(4097, 8193)}) == 32


def test_a_cpu_has_no_kernels_for_long_rows() -> None:
    assert not long_rows.applies(torch.zeros(1, 64))
