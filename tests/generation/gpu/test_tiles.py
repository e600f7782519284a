"""Keys and values in fewer bits in Triton's interpreter (see test_kernels.py): every reader reads the same numbers."""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1 from the start: triton reads it when it is imported", allow_module_level=True)

from helpers.new_tokens import spoil
from helpers.small_pages import SMALL, plain_pages, small_pages
from helpers.tiny import tiny_model

from lockstep.generation.gpu.attention import SharedPrefixes, copy_pages, decode_slots, paged_attention
from lockstep.generation.gpu.backend import CACHES
from lockstep.generation.gpu.block_attention import block_attention
from lockstep.generation.gpu.float8 import pages_at
from lockstep.generation.gpu.fused import FusedDecoder, fuse_projections
from lockstep.generation.gpu.prefill import PromptRows, packed_prompt_attention
from lockstep.generation.pages import CacheShape
from lockstep.models.attention import Variant

READ = {"fp8": pages_at}


def scene(kept: str) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    """Pages of fewer bits, their scales, and pages in float32 with the same numbers; three sequences of 34, 3 and 18 tokens."""
    torch.manual_seed(0)
    pages = torch.randn(9, 16, 2, DIM), torch.randn(9, 16, 2, DIM)
    spoil(pages, TABLE, [34, 3, 18])
    codes, scales = small_pages(pages, kept)
    keys, values = plain_pages(codes, scales, kept)
    return codes, scales, (keys.float().contiguous(), values.float().contiguous())


DIM = 64
TABLE = torch.tensor([[3, 1, 5], [2, 6, 4], [7, 8, 0]], dtype=torch.int32)


@pytest.mark.parametrize("kept", SMALL)
@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("window", [None, 20])
def test_paged_attention_over_small_pages_is_that_over_their_numbers(kept: str, splits: int, window: int | None) -> None:
    codes, scales, plain = scene(kept)
    query = torch.randn(3, 6, DIM)
    context = torch.tensor([33, 2, 17], dtype=torch.int32)
    options = {"scale": 0.2, "window": window, "splits": splits}
    out = paged_attention(query, *codes, TABLE, context, scales=scales, kept=kept, **options)
    assert torch.equal(out, paged_attention(query, *plain, TABLE, context, **options))
    assert out.isfinite().all()


@pytest.mark.parametrize("kept", SMALL)
def test_shared_prefixes_of_small_pages_change_nothing(kept: str) -> None:
    codes, scales, plain = scene(kept)
    table = TABLE[[0, 0, 0]].clone()
    table[1, 1:] = table[1, 1:].flip(0)
    query = torch.randn(3, 6, DIM)
    context = torch.tensor([20, 16, 33], dtype=torch.int32)
    shared = SharedPrefixes(*(torch.tensor(x, dtype=torch.int32) for x in ([0, 0], [3, 0], [16, 16, 16])))
    out = paged_attention(query, *codes, table, context, scale=0.2, shared=shared, splits=1, scales=scales, kept=kept)
    alone = paged_attention(query, *plain, table, context, scale=0.2, splits=1)
    torch.testing.assert_close(out, alone, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kept", SMALL)
@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("window", [None, 20])
def test_block_attention_over_small_pages_is_that_over_their_numbers(kept: str, splits: int, window: int | None) -> None:
    codes, scales, plain = scene(kept)
    query = torch.randn(12, 6, DIM)
    context = torch.tensor([30, 31, 32, 33, 0, 1, 2, 2, 15, 16, 17, 17], dtype=torch.int32)
    options = {"scale": 0.2, "window": window, "splits": splits}
    out = block_attention(query, *codes, TABLE, context, scales=scales, kept=kept, **options)
    assert torch.equal(out, block_attention(query, *plain, TABLE, context, **options))
    assert out.isfinite().all()


@pytest.mark.parametrize("kept", SMALL)
def test_a_prompt_that_is_cut_reads_back_what_it_has_stored(kept: str) -> None:
    codes, scales, plain = scene(kept)
    slots = torch.cat(
        [TABLE[0].long()[:, None] * 16 + torch.arange(16), TABLE[2].long()[:, None] * 16 + torch.arange(16)]
    ).flatten()
    slots = torch.cat([slots[:34], slots[48 : 48 + 18]])
    for found, want in zip(READ[kept](*codes, scales, slots, torch.float32), plain, strict=True):
        assert torch.equal(found.float(), want.flatten(0, 1)[slots])
    query = torch.randn(12, 6, DIM)
    key = torch.empty(12, 2, DIM)
    rows = PromptRows([4, 8], [30, 10], torch.tensor([3, 11]), slots)
    variant = Variant(0.2, None)
    out = packed_prompt_attention(query, key, key, *codes, rows, variant, scales)
    torch.testing.assert_close(out, packed_prompt_attention(query, key, key, *plain, rows, variant))


@pytest.mark.parametrize("kept", SMALL)
def test_pages_are_copied_with_their_scales(kept: str) -> None:
    cache = CACHES[kept](CacheShape(2, 2, DIM, 16, torch.bfloat16, kept), 5, torch.device("cpu"))
    assert cache.scales is not None
    whole = cache.pool.view(torch.uint8)
    scales = cache.scales.view(torch.int16)
    whole.copy_(torch.randint(0, 127, whole.shape))
    scales.copy_(torch.randint(0, 1000, scales.shape))
    want = whole.clone()
    want_scales = scales.clone()
    want[:, :, [4, 1]], want_scales[:, [4, 1]] = whole[:, :, [2, 2]], scales[:, [2, 2]]
    sources = torch.tensor([2, 2])
    targets = torch.tensor([4, 1])
    copy_pages(cache.pool, sources, targets)
    copy_pages(cache.scales[:, None], sources, targets)
    assert torch.equal(whole, want)
    assert torch.equal(scales, want_scales)
    assert cache.shape.page_bytes * 5 == whole.nbytes + scales.nbytes


@pytest.mark.parametrize("kept", SMALL)
@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
@torch.no_grad()
def test_every_way_to_compute_tokens_stores_and_reads_the_same_numbers(family: str, kept: str) -> None:
    """Two tokens each of three sequences: one by one with few rows, one by one with many, in blocks, and as a whole prompt. In the second
    layer a number may fall on the other side of a rounding: the logits are within 2 % in norm."""
    torch.manual_seed(0)
    model = tiny_model(family, head_dim=DIM, max_position_embeddings=512)
    fuse_projections(model)
    shape = CacheShape(2, 2, DIM, 16, torch.float32, kept)
    caches = [CACHES[kept](shape, 7, torch.device("cpu")) for _ in range(4)]
    few, many, blocks, whole = (FusedDecoder(model, cache, 64) for cache in caches)
    ids = torch.randint(2, 32, (3, 2))
    table = torch.tensor([[1], [5], [3]], dtype=torch.int32)
    for place in range(2):
        context = torch.full((3,), place, dtype=torch.int32)
        step = ids[:, place], *decode_slots(table, context, 16), table, context
        from_few = few.decode(*step, None)
        want = many.logits(many.hidden(*step))
    positions = torch.arange(2).repeat(3)
    slots = (table.long() * 16 + torch.arange(2)).flatten()
    from_blocks = blocks.logits(blocks.hidden(ids.flatten(), positions, slots, table, positions.int())[1::2])
    from_whole = whole.prefill(ids.flatten(), positions, slots, PromptRows([2] * 3, [0] * 3, torch.tensor([1, 3, 5]), None))
    for found in (from_few, from_blocks, from_whole):
        assert (found - want).norm() < 0.02 * want.norm()
    stored = [plain_pages(c.layer(0), c.scales[0], kept) for c in caches if c.scales is not None]
    for other in stored[1:]:  # of the first layer, whose inputs are the same
        for a, b in zip(stored[0], other, strict=True):
            assert torch.equal(a[table[:, 0].long(), :2], b[table[:, 0].long(), :2])
