"""Keys and values as float8 in Triton's interpreter (see test_kernels.py): what is lost, and that every reader reads the same numbers."""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1 from the start: triton reads it when it is imported", allow_module_level=True)

import triton
import triton.language as tl
from helpers.new_tokens import float8_pages, plain_pages, rounded, spoil
from helpers.tiny import tiny_model

from lockstep.models.cached_attention import Variant
from lockstep.workers.rollout.native.float8_cache import Float8Cache
from lockstep.workers.rollout.native.gpu.attention import SharedPrefixes, copy_pages, decode_slots, paged_attention
from lockstep.workers.rollout.native.gpu.block_attention import block_attention
from lockstep.workers.rollout.native.gpu.float8 import (
    encode,
    key_scale,
    pack_scales,
    pages_at,
    scale_of,
    split_pairs,
    value_power,
    value_scale,
)
from lockstep.workers.rollout.native.gpu.fused import FusedDecoder, fuse_projections
from lockstep.workers.rollout.native.gpu.prefill import PromptRows, packed_prompt_attention
from lockstep.workers.rollout.native.pages import CacheShape


@triton.jit
def _quantise(X, CODES, SCALES, N: tl.constexpr, D: tl.constexpr):
    n, d = tl.arange(0, N), tl.arange(0, D)
    x = tl.load(X + n[:, None] * D + d[None, :])
    scale, inverse = scale_of(x, 1)
    tl.store(CODES + n[:, None] * D + d[None, :], encode(x * inverse))
    tl.store(SCALES + n[:, None], scale)


def quantised(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What the kernels make of heads [n, D]: codes, and scales [n, 1]."""
    codes, scales = torch.zeros(x.shape).to(torch.float8_e4m3fn), torch.zeros(len(x), 1)
    _quantise[(1,)](x, codes, scales, N=x.shape[0], D=x.shape[1])
    return codes, scales


def test_numbers_are_rounded_to_the_nearest_and_off_by_no_more_than_is_stated() -> None:
    torch.manual_seed(0)
    heads = torch.randn(256, 64) * torch.exp2(torch.randint(-30, 30, (256, 1)).float())
    heads[:128] *= torch.exp2(torch.randint(-20, 1, (128, 64)).float())  # all sizes in one head
    heads[0], heads[1, 1:] = 0.0, 0.0
    codes, scales = quantised(heads)
    want, want_scales = rounded(heads[1:])
    assert torch.equal(codes[1:].view(torch.uint8), want.view(torch.uint8))
    assert torch.equal(scales[1:].double(), want_scales)
    assert codes[0].float().abs().max() == 0
    assert torch.equal(scales, scales.bfloat16().float())
    back = codes.double() * scales.double()
    assert torch.equal(back, back.bfloat16().double()), "bfloat16 has room for all of it"
    largest = heads.double().abs().amax(1, keepdim=True)
    assert ((back - heads.double()).abs() <= torch.maximum(heads.double().abs() / 16, largest / 2**17)).all()
    error = (back - heads.double())[128:].norm(dim=1) / heads.double()[128:].norm(dim=1)
    assert error.max() < 0.04, "of normal numbers"


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_head_that_is_not_finite_has_a_scale_that_is_not_a_number_and_finite_codes(bad: float) -> None:
    heads = torch.randn(4, 32)
    heads[2, 5] = bad
    codes, scales = quantised(heads)
    assert scales[:, 0].isnan().tolist() == [False, False, True, False]
    assert codes.float().isfinite().all()


@triton.jit
def _unpack(A, B, OUT, N: tl.constexpr):
    i = tl.arange(0, N)
    packed = pack_scales(tl.load(A + i), tl.load(B + i))
    tl.store(OUT + i, key_scale(packed))
    tl.store(OUT + N + i, value_scale(packed))
    tl.store(OUT + 2 * N + i, value_power(packed))


@triton.jit
def _split(PAIRS, OUT, N: tl.constexpr):
    i = tl.arange(0, N)
    first, second = split_pairs(tl.load(PAIRS + i), False)
    tl.store(OUT + 2 * i, first)
    tl.store(OUT + 2 * i + 1, second)


def test_scales_and_pairs_come_apart_again() -> None:
    powers = torch.arange(-40, 88, dtype=torch.float32)
    out = torch.zeros(3, 128)
    _unpack[(1,)](powers.exp2(), powers.flip(0).exp2(), out, N=128)
    assert torch.equal(out, torch.stack([powers.exp2(), powers.flip(0).exp2(), powers.flip(0)]))
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[codes & 127 != 127].repeat(2)[:256]  # not those that are no numbers
    numbers = torch.zeros(256, dtype=torch.float16)
    _split[(1,)](codes.view(torch.int16), numbers, N=128)
    assert torch.equal(numbers.float(), codes.view(torch.float8_e4m3fn).float())


def scene() -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    """Float8 pages, their scales, and pages in float32 with the same numbers; three sequences of 34, 3 and 18 tokens."""
    torch.manual_seed(0)
    pages = torch.randn(9, 16, 2, 32), torch.randn(9, 16, 2, 32)
    spoil(pages, TABLE, [34, 3, 18])
    codes, scales = float8_pages(pages)
    keys, values = plain_pages(codes, scales)
    return codes, scales, (keys.float().contiguous(), values.float().contiguous())


TABLE = torch.tensor([[3, 1, 5], [2, 6, 4], [7, 8, 0]], dtype=torch.int32)


@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("window", [None, 20])
def test_paged_attention_over_float8_is_that_over_its_numbers(splits: int, window: int | None) -> None:
    codes, scales, plain = scene()
    query, context = torch.randn(3, 6, 32), torch.tensor([33, 2, 17], dtype=torch.int32)
    options = {"scale": 0.2, "window": window, "splits": splits}
    out = paged_attention(query, *codes, TABLE, context, scales=scales, **options)
    assert torch.equal(out, paged_attention(query, *plain, TABLE, context, **options))
    assert out.isfinite().all()


def test_shared_prefixes_of_float8_pages_change_nothing() -> None:
    codes, scales, plain = scene()
    table = TABLE[[0, 0, 0]].clone()
    table[1, 1:] = table[1, 1:].flip(0)
    query, context = torch.randn(3, 6, 32), torch.tensor([20, 16, 33], dtype=torch.int32)
    shared = SharedPrefixes(*(torch.tensor(x, dtype=torch.int32) for x in ([0, 0], [3, 0], [16, 16, 16])))
    out = paged_attention(query, *codes, table, context, scale=0.2, shared=shared, splits=1, scales=scales)
    alone = paged_attention(query, *plain, table, context, scale=0.2, splits=1)
    torch.testing.assert_close(out, alone, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("window", [None, 20])
def test_block_attention_over_float8_is_that_over_its_numbers(splits: int, window: int | None) -> None:
    codes, scales, plain = scene()
    query = torch.randn(12, 6, 32)
    context = torch.tensor([30, 31, 32, 33, 0, 1, 2, 2, 15, 16, 17, 17], dtype=torch.int32)
    options = {"scale": 0.2, "window": window, "splits": splits}
    out = block_attention(query, *codes, TABLE, context, scales=scales, **options)
    assert torch.equal(out, block_attention(query, *plain, TABLE, context, **options))
    assert out.isfinite().all()


def test_a_prompt_that_is_cut_reads_back_what_it_has_stored() -> None:
    codes, scales, plain = scene()
    slots = torch.cat(
        [TABLE[0].long()[:, None] * 16 + torch.arange(16), TABLE[2].long()[:, None] * 16 + torch.arange(16)]
    ).flatten()
    slots = torch.cat([slots[:34], slots[48 : 48 + 18]])
    for found, want in zip(pages_at(*codes, scales, slots, torch.float32), plain, strict=True):
        assert torch.equal(found.float(), want.flatten(0, 1)[slots])
    query, key = torch.randn(12, 6, 32), torch.empty(12, 2, 32)
    rows = PromptRows([4, 8], [30, 10], torch.tensor([3, 11]), slots)
    variant = Variant(0.2, None)
    out = packed_prompt_attention(query, key, key, *codes, rows, variant, scales.float())
    torch.testing.assert_close(out, packed_prompt_attention(query, key, key, *plain, rows, variant))


def test_pages_are_copied_with_their_scales() -> None:
    cache = Float8Cache(CacheShape(2, 2, 32, 16, torch.bfloat16, float8=True), 5, torch.device("cpu"))
    whole = cache.pool.view(torch.uint8)
    whole.copy_(torch.randint(0, 127, whole.shape))
    cache.scales.normal_()
    want, want_scales = whole.clone(), cache.scales.clone()
    want[:, :, [4, 1]], want_scales[:, [4, 1]] = whole[:, :, [2, 2]], cache.scales[:, [2, 2]]
    sources, targets = torch.tensor([2, 2]), torch.tensor([4, 1])
    copy_pages(cache.pool, sources, targets)
    copy_pages(cache.scales[:, None], sources, targets)
    assert torch.equal(whole, want)
    assert torch.equal(cache.scales, want_scales)
    assert cache.shape.page_bytes * 5 == whole.nbytes + cache.scales.nbytes


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
@torch.no_grad()
def test_every_way_to_compute_tokens_stores_and_reads_the_same_numbers(family: str) -> None:
    """Two tokens each of three sequences: one by one with few rows, one by one with many, in blocks, and as a whole prompt. In the second
    layer a number may fall on the other side of a rounding: the logits are within 2 % in norm."""
    torch.manual_seed(0)
    model = tiny_model(family, head_dim=32, max_position_embeddings=512)
    fuse_projections(model)
    shape = CacheShape(2, 2, 32, 16, torch.float32, float8=True)
    caches = [Float8Cache(shape, 7, torch.device("cpu")) for _ in range(4)]
    few, many, blocks, whole = (FusedDecoder(model, cache, 64) for cache in caches)
    ids, table = torch.randint(2, 32, (3, 2)), torch.tensor([[1], [5], [3]], dtype=torch.int32)
    for place in range(2):
        context = torch.full((3,), place, dtype=torch.int32)
        step = ids[:, place], *decode_slots(table, context, 16), table, context
        from_few, want = few.decode(*step, None), many.logits(many.hidden(*step))
    positions, slots = torch.arange(2).repeat(3), (table.long() * 16 + torch.arange(2)).flatten()
    from_blocks = blocks.logits(blocks.hidden(ids.flatten(), positions, slots, table, positions.int())[1::2])
    from_whole = whole.prefill(ids.flatten(), positions, slots, PromptRows([2] * 3, [0] * 3, torch.tensor([1, 3, 5]), None))
    for found in (from_few, from_blocks, from_whole):
        assert (found - want).norm() < 0.02 * want.norm()
    stored = [plain_pages((c.pool[0, 0], c.pool[0, 1]), c.scales[0]) for c in caches]
    for other in stored[1:]:  # of the first layer, whose inputs are the same
        for a, b in zip(stored[0], other, strict=True):
            assert torch.equal(a[table[:, 0].long(), :2], b[table[:, 0].long(), :2])
