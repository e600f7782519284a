"""Flash attention over packed segments on a GPU, where a segment may also see all of another one that comes before it.

Softmax over two sets of keys is joined from a pass over each: with outputs o1, o2 and log-sum-exps l1, l2 of the scores,

    l = log(exp l1 + exp l2),   o = exp(l1 - l) o1 + exp(l2 - l) o2

and since a flash backward pass needs of the softmax only o and l, each set's gradients come from a pass that is given the joined ones.
Legend: N tokens, P tokens of shared segments, H query heads, K key-value heads, D head size.
"""

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.kernels import long_rows

FLASH_TYPES = (torch.bfloat16, torch.float16)
_LARGEST_HEAD = 256


class SegmentBounds(NamedTuple):
    """Which queries see which keys: those between `queries[i]` and `queries[i + 1]` see the keys between `keys[i]` and `keys[i + 1]`."""

    queries: Tensor
    """[S + 1] int32, on the device."""
    keys: Tensor
    """[S + 1] int32, on the device."""
    longest_query: int
    longest_key: int


class SegmentRun(NamedTuple):
    """Neighbouring segments, from token `start` to `stop`, that are computed together."""

    start: int
    stop: int
    bounds: SegmentBounds | None
    """Where each begins, counted from `start`; None for a segment that is long enough to be computed alone (long_rows.py)."""


def cut_runs(lengths: Sequence[int], device: torch.device | str, longest_packed: int) -> list[SegmentRun]:
    """Return the runs of segments of these lengths that lie end to end; segments longer than `longest_packed` are alone."""
    runs: list[SegmentRun] = []
    start = 0
    for is_long, neighbours in groupby(lengths, lambda length: length > longest_packed):
        if is_long:
            for length in neighbours:
                runs.append(SegmentRun(start, start + length, None))
                start += length
        else:
            packed = list(neighbours)
            runs.append(SegmentRun(start, start + sum(packed), own_bounds(packed, device)))
            start += sum(packed)
    return runs


def own_bounds(lengths: Sequence[int], device: torch.device | str) -> SegmentBounds:
    """Return the bounds of segments that see themselves."""
    ends = F.pad(torch.tensor(lengths).cumsum(0), (1, 0)).to(torch.int32).to(device, non_blocking=True)
    return SegmentBounds(ends, ends, max(lengths), max(lengths))


def applies(query: Tensor, value: Tensor) -> bool:
    """Whether the kernels take these tensors [..., D]."""
    size = query.shape[-1]
    return query.is_cuda and query.dtype in FLASH_TYPES and value.shape[-1] == size <= _LARGEST_HEAD and size % 8 == 0


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    own: Sequence[SegmentRun],
    shared: SegmentBounds | None,
    num_shared: int,
    scale: float | None,
    window: int | None = None,
) -> Tensor:
    """Causal attention inside the segments of `own`, which are all tokens; [N, H, D] from query [N, H, D], key and value [N, K, D].

    The first `num_shared` (P) tokens are shared segments. `shared` bounds queries from P on against keys up to P, whose whole segments
    they see. `window` (itself and the window - 1 tokens before) goes without `shared`, and with packed runs, only.
    """
    assert shared is None or window is None, "a window over a shared segment is not written"
    return _Attend.apply(query.contiguous(), key.contiguous(), value.contiguous(), own, shared, num_shared, scale, window)


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        own: Sequence[SegmentRun],
        shared: SegmentBounds | None,
        p: int,
        scale: float | None,
        window: int | None,
    ) -> Tensor:
        def attend_own(run: SegmentRun) -> tuple[Tensor, ...]:
            q, k, v = (x[run.start : run.stop] for x in (query, key, value))
            if run.bounds is None:
                return long_rows.forward(q, k, v, scale)
            return _forward(q, k, v, run.bounds, True, scale, window)

        out, lse = _end_to_end(own, attend_own, (0, 1))
        if shared is not None:
            more, more_lse = _forward(query[p:], key[:p], value[:p], shared, False, scale, None)
            _join(out[p:], lse[:, p:], more, more_lse)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.options = own, shared, p, scale, window
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        query, key, value, out, lse = ctx.saved_tensors
        own, shared, p, scale, window = ctx.options
        grad = grad.contiguous()

        def differentiate(run: SegmentRun) -> tuple[Tensor, ...]:
            g, q, k, v, o = (x[run.start : run.stop] for x in (grad, query, key, value, out))
            own_lse = lse[:, run.start : run.stop].contiguous()
            if run.bounds is None:
                return long_rows.backward(g, q, k, v, o, own_lse, scale)
            return _backward(g, q, k, v, o, own_lse, run.bounds, True, scale, window)

        dq, dk, dv = _end_to_end(own, differentiate, (0, 0, 0))
        if shared is not None:
            part = (grad[p:], query[p:], key[:p], value[:p], out[p:], lse[:, p:].contiguous())
            for total, more in zip((dq[p:], dk[:p], dv[:p]), _backward(*part, shared, False, scale, None), strict=True):
                total += more
        return dq, dk, dv, *(None,) * 5


def _end_to_end(
    own: Sequence[SegmentRun], compute: Callable[[SegmentRun], tuple[Tensor, ...]], dims: tuple[int, ...]
) -> tuple[Tensor, ...]:
    """What `compute` gives for each run, each of its tensors end to end along its dimension."""
    found = [compute(run) for run in own]
    if len(found) == 1:
        return tuple(x.contiguous() for x in found[0])
    return tuple(torch.cat(parts, dim) for parts, dim in zip(zip(*found, strict=True), dims, strict=True))


def _join(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> None:
    """Make `out` [N, H, D] and `lse` [H, N] those over both sets of keys, in place; `more`, `more_lse` are of the second set."""
    if out.is_cuda:
        from lockstep.kernels.join import join

        join(out, lse, more, more_lse)
        return
    joined = torch.logaddexp(lse, more_lse)
    mine, theirs = (torch.exp(x - joined).t()[:, :, None] for x in (lse, more_lse))
    out.copy_(mine * out + theirs * more)
    lse.copy_(joined)


def _forward(
    query: Tensor, key: Tensor, value: Tensor, bounds: SegmentBounds, causal: bool, scale: float | None, window: int | None
) -> tuple[Tensor, Tensor]:
    """Output [N, H, D] and log-sum-exp of the scores [H, N]."""
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        query,
        key,
        value,
        *bounds,
        0.0,
        causal,
        False,
        scale=scale,
        **_sides(causal, window),
    )
    return out, lse


def _backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    bounds: SegmentBounds,
    causal: bool,
    scale: float | None,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    no_dropout = torch.zeros(2, dtype=torch.uint64, device=query.device), torch.empty(0, device=query.device)
    return torch.ops.aten._flash_attention_backward(
        grad,
        query,
        key,
        value,
        out,
        lse,
        *bounds,
        0.0,
        causal,
        *no_dropout,
        scale=scale,
        **_sides(causal, window),
    )


def _sides(causal: bool, window: int | None) -> dict[str, int]:
    return {"window_size_left": -1 if window is None else window - 1, "window_size_right": 0 if causal else -1}
