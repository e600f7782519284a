"""Ulysses sequence parallelism: the ranks of a group have a part of the tokens each.

Everything but attention looks at one token at a time, so a rank computes it for its own. Before attention the ranks exchange: each gives
away its tokens of most heads and gets all tokens of a few heads; after attention they exchange back.

```text
[1, H, N / W, D]  --heads_for_tokens-->  [1, H / W, N, D]  --attention-->  [1, N, H / W, D]  --tokens_for_heads-->  [1, N / W, H, D]
```

Every rank of the group has to call these together. Legend: W ranks, N tokens, H heads, D head size.
"""

import math
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor


def heads_for_tokens(query: Tensor, key: Tensor, value: Tensor, num_tokens: int, group: dist.ProcessGroup) -> list[Tensor]:
    """Give away tokens, get heads: each [1, H, n, D] of this rank's n tokens becomes [1, H / W, N, D] of its heads of all tokens.

    The last W n - N tokens, which fill up the parts, are dropped. Heads of keys and values that W does not divide are repeated until it
    does; W has to divide those of the queries.
    """
    ranks = group.size()
    assert query.shape[1] % ranks == 0, f"{query.shape[1]} heads do not divide among {ranks} ranks"
    whole = [query, *(_repeated(x, ranks) for x in (key, value))]
    blocks = [x[0].unflatten(0, (ranks, -1)) for x in whole]  # [W, H / W, n, D]
    flat = [block.flatten(1) for block in blocks]
    received = _exchange(torch.cat(flat, 1), group).split([x.shape[1] for x in flat], 1)
    parts = (x.view(block.shape).transpose(0, 1).flatten(1, 2) for x, block in zip(received, blocks, strict=True))
    return [x[None, :, :num_tokens] for x in parts]


def tokens_for_heads(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Give away heads, get tokens: [1, N, H / W, D] of all tokens becomes [1, n, H, D] of this rank's; what fills up the parts is 0."""
    ranks = group.size()
    filled = F.pad(x[0], (0, 0, 0, 0, 0, -x.shape[1] % ranks))
    received = _exchange(filled.unflatten(0, (ranks, -1)), group)  # [W, n, H / W, D]
    return received.transpose(0, 1).flatten(1, 2)[None]


def gather_columns(column: Tensor, most: int, places: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Put together what the ranks computed: entry i of the result [M] is number `places[i]` of all ranks' columns end to end.

    Each rank's column counts as `most` long. Every rank gets all entries and computes the same loss from them; the gradient that reaches
    a rank's own column is that of this loss, so that gradients of all ranks add up to the whole.
    """
    return _Gather.apply(F.pad(column, (0, most - len(column))), group)[places]


def _repeated(x: Tensor, ranks: int) -> Tensor:
    """Each head of x [1, H, n, D] as often as it takes for `ranks` to divide their number; neighbouring queries keep their keys."""
    times = ranks // math.gcd(x.shape[1], ranks)
    return x if times == 1 else x.repeat_interleave(times, 1)


def _exchange(blocks: Tensor, group: dist.ProcessGroup) -> Tensor:
    return _Exchange.apply(blocks, group)


class _Exchange(torch.autograd.Function):
    """[W, ...]: entry i goes to rank i, entry i of the result comes from it. The gradient goes the same way back."""

    @staticmethod
    def forward(ctx: Any, blocks: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        received = torch.empty_like(blocks, memory_format=torch.contiguous_format)
        dist.all_to_all_single(received, blocks.contiguous(), group=group)
        return received

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _exchange(grads[0], ctx.group), None


class _Gather(torch.autograd.Function):
    """[m] of each rank, end to end: [W m]. The gradient is this rank's part of it."""

    @staticmethod
    def forward(ctx: Any, column: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        whole = column.new_empty(group.size() * len(column))
        dist.all_gather(list(whole.chunk(group.size())), column.contiguous(), group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0].chunk(ctx.group.size())[ctx.group.rank()], None
