"""Attention of new tokens in one kernel, in Triton's interpreter (see test_kernels.py), against float64; tests/gpu has the compiled one."""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1 from the start: triton reads it when it is imported", allow_module_level=True)

from helpers.new_tokens import make_new_tokens
from helpers.small_pages import plain_pages
from helpers.tiny import tiny_model

from lockstep.generation.gpu import new_token
from lockstep.generation.gpu.attention import decode_slots
from lockstep.generation.gpu.fused import FusedDecoder, fuse_projections
from lockstep.generation.gpu.new_token import NewToken, cuts
from lockstep.generation.pages import CacheShape, KVCache


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize(("parts", "norm", "dim"), [(0, False, 24), (3, True, 16), (1, False, 32)])
def test_one_kernel_rotates_stores_attends_and_joins(
    monkeypatch: pytest.MonkeyPatch, splits: int, window: int | None, parts: int, norm: bool, dim: int
) -> None:
    """Whether keys are loaded before the kernel waits (first turn) or after."""
    case = make_new_tokens(torch.device("cpu"), torch.float32, parts=parts, norm=norm, dim=dim)
    attention = NewToken(case.heads, case.cos, case.sin, 1e-6)
    for warps in (new_token._MOST_LOADING_WARPS, 0):  # what the first call has counted must not be there for the second
        monkeypatch.setattr(new_token, "_MOST_LOADING_WARPS", warps)
        out = attention(
            case.qkv, case.bias, case.norms, *case.pages, case.positions, case.slots, case.table, case.context, scale=0.2, window=window,
            splits=splits,
        )  # fmt: skip
        want, keys, values = case.expected(scale=0.2, window=window)
        torch.testing.assert_close(out.double(), want, atol=1e-5, rtol=1e-5)
        for pages, new in zip(case.pages, (keys, values), strict=True):
            stored = pages.flatten(0, 1)[case.slots]
            torch.testing.assert_close(stored.double(), new, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize(
    ("kept", "tile", "window", "parts", "norm", "dim", "heads"),
    [
        ("fp8", 16, None, 0, False, 64, 6),
        ("fp8", 16, 20, 3, True, 32, 14),
        ("fp8", 32, None, 1, False, 32, 18),
        ("fp8", 32, 20, 0, False, 64, 6),
    ],
)
def test_pages_of_fewer_bits_are_read_as_what_they_stand_for(
    monkeypatch: pytest.MonkeyPatch,
    kept: str,
    tile: int,
    splits: int,
    window: int | None,
    parts: int,
    norm: bool,
    dim: int,
    heads: int,
) -> None:
    """Weights and queries have 11 bits: 5e-4 of the result. Tokens differ in size by up to 2^18."""
    monkeypatch.setitem(new_token._SMALL, "TILE", tile)
    case = make_new_tokens(torch.device("cpu"), torch.float32, parts=parts, norm=norm, dim=dim, heads=heads, kept=kept)
    attention = NewToken(case.heads, case.cos, case.sin, 1e-6)
    for warps in (new_token._MOST_LOADING_WARPS, 0):
        monkeypatch.setattr(new_token, "_MOST_LOADING_WARPS", warps)
        out = attention(
            case.qkv, case.bias, case.norms, *case.pages, case.positions, case.slots, case.table, case.context, scale=0.2, window=window,
            splits=splits, scales=case.scales, kept=kept,
        )  # fmt: skip
        want, keys, values = case.expected(scale=0.2, window=window)
        assert ((out.double() - want).norm(dim=1) < 5e-4 * want.norm(dim=1)).all()
        assert case.scales is not None
        for pages, new in zip(plain_pages(case.pages, case.scales, kept), (keys, values), strict=True):
            assert torch.equal(pages.flatten(0, 1)[case.slots], new)


@pytest.mark.parametrize("kept", ["auto", "fp8"])
def test_splits_without_a_token_change_nothing(monkeypatch: pytest.MonkeyPatch, kept: str) -> None:
    """With 16 splits most have none. The same bits whether keys are loaded before the kernel waits or after."""
    made = []
    for warps in (1 << 20, 0):
        monkeypatch.setattr(new_token, "_MOST_LOADING_WARPS", warps)
        case = make_new_tokens(torch.device("cpu"), torch.float32, parts=3, norm=False, dim=64, heads=6, kept=kept)
        attention = NewToken(case.heads, case.cos, case.sin, 1e-6)
        made.append(attention(
            case.qkv, case.bias, case.norms, *case.pages, case.positions, case.slots, case.table, case.context, scale=0.2, window=None,
            splits=16, scales=case.scales, kept=kept,
        ))  # fmt: skip
    assert torch.equal(*made)


def test_few_rows_are_cut_into_many_splits() -> None:
    rows = (8, 16, 32, 48, 64, 96, 128, 160)
    assert [cuts(n, 2) for n in rows] == [16, 8, 4, 4, 2, 2, 2, 1]
    assert [cuts(n, 2, "fp8") for n in rows] == [16, 16, 8, 8, 4, 4, 2, 1]


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@torch.no_grad()
def test_decoding_few_rows_gives_the_logits_of_the_kernels_for_many(family: str) -> None:
    """The same step with projections rotated, stored and attended in kernels of their own."""
    model = tiny_model(family, max_position_embeddings=512)
    fuse_projections(model)
    dim = 8
    caches = [KVCache(CacheShape(2, 2, dim, 64, torch.float32), 13, torch.device("cpu")) for _ in range(2)]
    for cache in caches:
        cache.pool.copy_(torch.randn(cache.pool.shape, generator=torch.Generator().manual_seed(0)))
    table = (1 + torch.arange(12).view(4, 3)).int()
    context = torch.tensor([0, 130, 64, 63], dtype=torch.int32)
    inputs = torch.tensor([3, 7, 1, 9]), *decode_slots(table, context, 64), table, context
    few, many = (FusedDecoder(model, cache, 192) for cache in caches)
    torch.testing.assert_close(few.decode(*inputs, None), many.logits(many.hidden(*inputs)), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(caches[0].pool, caches[1].pool, atol=1e-5, rtol=1e-5)
