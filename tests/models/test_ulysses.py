"""Attention divided among ranks against attention with all heads and tokens in one place: outputs and gradients."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.distributed import run_distributed
from torch import Tensor

from lockstep.models.attention import PackedLayout, packed_attention
from lockstep.models.ulysses import gather_columns

LAYOUTS = {
    "rows alone": PackedLayout(torch.tensor([5, 1, 4])),
    "prompts shared": PackedLayout(torch.tensor([3, 2, 4, 1, 2, 3]), followers=[3, 1]),
    "fewer tokens than ranks": PackedLayout(torch.tensor([2])),
}


def attention_and_gradients(heads: int, kv_heads: int, layout: PackedLayout, options: dict[str, Any]) -> dict[str, Tensor]:
    """Output and gradients of a sum with fixed factors, as whole tensors, from this rank's part of the tokens."""
    generator = torch.Generator().manual_seed(0)
    tokens = int(layout.lengths.sum())
    q, k, v = (torch.randn(1, h, tokens, 8, generator=generator) for h in (heads, kv_heads, kv_heads))
    factors = torch.randn(1, tokens, heads, 8, generator=generator)
    options = dict(options)
    sinks = options["s_aux"] = torch.randn(heads, generator=generator, requires_grad=True) if options.pop("sinks", False) else None
    group = dist.group.WORLD
    ranks, rank = group.size(), group.rank()
    size = -(-tokens // ranks)
    fill, own = ranks * size - tokens, slice(rank * size, (rank + 1) * size)
    parts = [torch.nn.functional.pad(x, (0, 0, 0, fill), value=9.0)[:, :, own].clone().requires_grad_() for x in (q, k, v)]
    weights = torch.nn.functional.pad(factors, (0, 0, 0, 0, 0, fill))[:, own]
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)  # of what a later torch will not have
        out, _ = packed_attention(torch.nn.Module(), *parts, None, layout=layout.divided(group) if ranks > 1 else layout, **options)
        (out * weights).sum().backward()

    def whole(part: Tensor, dim: int) -> Tensor:
        every = [torch.empty_like(part) for _ in range(ranks)]
        dist.all_gather(every, part.detach().contiguous())
        return torch.cat(every, dim).narrow(dim, 0, tokens)

    result = {"out": whole(out, 1)} | {n: whole(p.grad, 2) for n, p in zip("qkv", parts, strict=True)}
    if sinks is not None:
        dist.all_reduce(sinks.grad)
        result["sinks"] = sinks.grad
    return result


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "ranks", "options"),
    [
        (4, 4, 2, {}),
        (8, 2, 4, {"sliding_window": 3}),  # keys are repeated: fewer than ranks
        (12, 3, 2, {"softcap": 2.0, "scaling": 0.3}),  # keys are repeated: a number that the ranks do not divide
        (4, 1, 2, {"sinks": True}),
    ],
)
def test_divided_attention_is_attention(layout: str, heads: int, kv_heads: int, ranks: int, options: dict[str, Any]) -> None:
    """Float32; each number is the same sum in the same order, but for the gradients of repeated keys: within 1e-5."""
    arguments = (heads, kv_heads, LAYOUTS[layout], options)
    (expected,) = run_distributed(attention_and_gradients, 1, *arguments)
    for result in run_distributed(attention_and_gradients, ranks, *arguments):
        assert result.keys() == expected.keys()
        for name in expected:
            torch.testing.assert_close(result[name], expected[name], atol=1e-5, rtol=0)


def test_gathered_columns_are_in_order_and_their_gradients_add_up_to_the_whole() -> None:
    owners = [1, 0, 0, 1, 0]
    values = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])
    places = torch.tensor([3, 0, 1, 4, 2])

    def gather() -> tuple[Tensor, Tensor]:
        mine = torch.tensor([owner == dist.get_rank() for owner in owners])
        column = values[mine].requires_grad_()
        whole = gather_columns(column, 3, places, dist.group.WORLD)
        (whole**2).sum().backward()
        gradient = torch.zeros(5)
        gradient[mine] = column.grad
        return whole.detach(), gradient

    results = run_distributed(gather, 2)
    for whole, _ in results:
        assert torch.equal(whole, values)
    assert torch.equal(results[0][1] + results[1][1], 2 * values)
