"""The paged attention kernel against plain torch on random page tables."""

import pytest
import torch
from helpers.small_pages import plain_pages, small_pages
from torch import Tensor

pytest.importorskip("triton")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from lockstep.generation.gpu.attention import (
    SharedPrefixes,
    copy_pages,
    decode_slots,
    group_limit,
    num_splits,
    paged_attention,
    store_kv,
)
from lockstep.generation.gpu.block_attention import block_attention, block_size

PAGE = 64


def plain(query: Tensor, keys: Tensor, values: Tensor, scale: float, window: int | None, softcap: float | None) -> Tensor:
    """One row in float64: query [H, D], keys and values [n, kv_heads, D]."""
    group = query.shape[0] // keys.shape[1]
    k, v = (x.double().repeat_interleave(group, 1) for x in (keys, values))
    score = torch.einsum("hd,nhd->hn", query.double(), k) * scale
    if softcap is not None:
        score = softcap * torch.tanh(score / softcap)
    if window is not None:
        score[:, : max(len(keys) - window, 0)] = -torch.inf
    return torch.einsum("hn,nhd->hd", score.softmax(-1), v)


def scene(rows: int, heads: int, kv_heads: int, dim: int, dtype: torch.dtype, longest: int, seed: int = 0):
    """Queries, pages in random places, and contexts among which are 0, a page's edge and the longest."""
    torch.manual_seed(seed)
    width = longest // PAGE + 1
    pages = 1 + rows * width
    k, v = torch.randn(2, pages, PAGE, kv_heads, dim, device="cuda").to(dtype)
    table = (1 + torch.randperm(pages - 1, device="cuda")).view(rows, width).int()
    context = torch.randint(0, longest, (rows,), device="cuda").int()
    context[: min(rows, 4)] = torch.tensor([0, PAGE - 1, PAGE, longest - 1], device="cuda").int()[: min(rows, 4)]
    query = torch.randn(rows, heads, dim, device="cuda").to(dtype)
    return query, k, v, table, context


def worst_error(out: Tensor, query, k, v, table, context, **options) -> float:
    """The largest relative error (in norm) of a row."""
    worst = 0.0
    for row in range(len(query)):
        n = int(context[row]) + 1
        keys, values = (x[table[row].long()].flatten(0, 1)[:n] for x in (k, v))
        want = plain(query[row], keys, values, **options)
        worst = max(worst, float((out[row].double() - want).norm() / want.norm()))
    return worst


@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (12, 2), (7, 1), (40, 2)])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.bfloat16, 6e-3), (torch.float32, 2e-6)])
def test_every_head_size_and_group_equals_plain_torch(dim, heads, kv_heads, dtype, bound):
    for splits in (1, 4):
        query, k, v, table, context = scene(9, heads, kv_heads, dim, dtype, longest=500)
        out = paged_attention(query, k, v, table, context, scale=dim**-0.5, splits=splits)
        assert worst_error(out, query, k, v, table, context, scale=dim**-0.5, window=None, softcap=None) < bound


@pytest.mark.parametrize(("window", "softcap"), [(1, None), (100, None), (64, 20.0), (None, 5.0), (10_000, 50.0)])
@pytest.mark.parametrize("splits", [1, 2, 16])
def test_window_and_softcap_equal_plain_torch(window, softcap, splits):
    query, k, v, table, context = scene(6, 8, 2, 128, torch.float32, longest=700)
    out = paged_attention(query, k, v, table, context, scale=0.3, window=window, softcap=softcap, splits=splits)
    assert worst_error(out, query, k, v, table, context, scale=0.3, window=window, softcap=softcap) < 5e-6


def test_splits_fill_the_chip_and_depend_on_the_batch_alone():
    assert [num_splits(rows, 2) for rows in (8, 16, 32, 64, 128, 256, 1024)] == [16, 16, 8, 4, 2, 1, 1]
    assert [num_splits(rows, 2, long=True) for rows in (8, 16, 32, 64, 128, 256, 1024)] == [16, 16, 8, 8, 8, 4, 1]


def test_a_new_token_is_stored_where_attention_finds_it():
    _, k, v, table, context = scene(5, 4, 2, 64, torch.bfloat16, longest=300)
    positions, slots = decode_slots(table, context, PAGE)
    assert torch.equal(positions, context.long())
    new_k, new_v = torch.randn(2, 5, 2, 64, device="cuda").bfloat16()
    before = k.clone()
    store_kv(new_k, new_v, k, v, slots)
    for row, position in enumerate(context.tolist()):
        page = int(table[row, position // PAGE])
        assert torch.equal(k[page, position % PAGE], new_k[row])
        assert torch.equal(v[page, position % PAGE], new_v[row])
    assert (k != before).flatten(2).any(-1).sum() == 5


def test_pages_are_copied_in_every_layer():
    pool = torch.randn(3, 2, 10, PAGE, 2, 80, device="cuda")
    want = pool.clone()
    want[:, :, [7, 9]] = pool[:, :, [2, 2]]
    copy_pages(pool, torch.tensor([2, 2], device="cuda"), torch.tensor([7, 9], device="cuda"))
    assert torch.equal(pool, want)


def test_sinks_take_part_in_the_softmax():
    query, k, v, table, context = scene(5, 8, 2, 64, torch.float32, longest=300)
    sinks = 2 * torch.randn(8, device="cuda")
    plain_out = paged_attention(query, k, v, table, context, scale=0.1, splits=1)
    for splits in (1, 4):
        out = paged_attention(query, k, v, table, context, scale=0.1, sinks=sinks, splits=splits)
        for row in range(5):
            n = int(context[row]) + 1
            keys = k[table[row].long()].flatten(0, 1)[:n].repeat_interleave(4, 1)
            log_sum = (torch.einsum("hd,nhd->hn", query[row], keys) * 0.1).logsumexp(-1)
            want = plain_out[row] * torch.sigmoid(log_sum - sinks)[:, None]
            torch.testing.assert_close(out[row], want, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(12, 2, 128), (14, 2, 64), (4, 4, 80), (70, 1, 64)])
@pytest.mark.parametrize("softcap", [None, 10.0])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.bfloat16, 6e-3), (torch.float32, 2e-6)])
def test_shared_prefixes_change_nothing(heads, kv_heads, dim, softcap, dtype, bound):
    """Groups of several sizes, rows alone between them, and prefixes of one to three pages."""
    query, k, v, table, context = scene(20, heads, kv_heads, dim, dtype, longest=500)
    limit = group_limit(heads, kv_heads)
    first, size, tokens = (torch.zeros(n, dtype=torch.int32, device="cuda") for n in (10, 10, 20))
    row, number = 1, 0
    while row < 18:
        count, pages = min(2 + number, limit, 20 - row), 1 + number % 3
        if count > 1:
            table[row : row + count, :pages] = table[row, :pages].clone()
            context[row : row + count].clamp_(min=pages * PAGE)
            first[number], size[number], tokens[row : row + count] = row, count, pages * PAGE
            number += 1
        row += count + 1
    assert number > 0 or limit == 1
    shared = SharedPrefixes(first, size, tokens)
    out = paged_attention(query, k, v, table, context, scale=dim**-0.5, softcap=softcap, shared=shared, splits=1)
    assert worst_error(out, query, k, v, table, context, scale=dim**-0.5, window=None, softcap=softcap) < bound


@pytest.mark.parametrize(
    ("kept", "heads", "kv_heads", "dim"),
    [
        *(("fp8", *sizes) for sizes in ((12, 2, 128), (14, 2, 64), (4, 4, 32), (40, 2, 256))),
    ],
)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.bfloat16, 6e-3), (torch.float32, 2e-6)])
def test_pages_of_fewer_bits_are_read_as_what_they_stand_for(kept, heads, kv_heads, dim, dtype, bound):
    """One by one in one part and in four, with a window, and in blocks of tokens."""
    query, k, v, table, context = scene(9, heads, kv_heads, dim, dtype, longest=500)
    codes, scales = small_pages((k, v), kept)
    keys, values = plain_pages(codes, scales, kept)
    for splits, window in ((1, None), (4, None), (4, 100)):
        out = paged_attention(
            query, *codes, table, context, scale=dim**-0.5, splits=splits, window=window, scales=scales, kept=kept
        )
        assert worst_error(out, query, keys, values, table, context, scale=dim**-0.5, window=window, softcap=None) < bound
    tokens = block_size(heads, kv_heads)
    places = context.repeat_interleave(tokens) + torch.arange(tokens, device="cuda").repeat(9)
    places.clamp_(max=499)
    query = torch.randn(9 * tokens, heads, dim, device="cuda").to(dtype)
    out = block_attention(query, *codes, table, places.int(), scale=dim**-0.5, scales=scales, kept=kept)
    own = table.repeat_interleave(tokens, 0)
    assert worst_error(out, query, keys, values, own, places, scale=dim**-0.5, window=None, softcap=None) < bound
