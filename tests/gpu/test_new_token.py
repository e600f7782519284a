"""Attention of new tokens in one kernel, compiled, against float64."""

import pytest
import torch
from helpers.new_tokens import make_new_tokens
from helpers.small_pages import plain_pages

pytest.importorskip("triton")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from lockstep.generation.gpu import new_token
from lockstep.generation.gpu.new_token import NewToken

CONTEXTS = (0, 1, 63, 64, 65, 700, 1500, 127)


@pytest.mark.parametrize(("kind", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(12, 2, 128), (14, 2, 64), (9, 3, 64)])
@pytest.mark.parametrize(
    ("splits", "window", "warps"), [(1, None, 1024), (8, 100, 1024), (16, None, 1024), (2, None, 0), (8, 100, 0)]
)
def test_one_kernel_rotates_stores_attends_and_joins(monkeypatch, kind, tolerance, heads, kv_heads, dim, splits, window, warps):
    monkeypatch.setattr(new_token, "_MOST_LOADING_WARPS", warps)
    case = make_new_tokens(
        torch.device("cuda"), kind, parts=3, norm=dim == 128, dim=dim, heads=heads, kv_heads=kv_heads, page=64, contexts=CONTEXTS
    )
    attention = NewToken(heads, case.cos, case.sin, case.eps)

    def attend():
        return attention(
            case.qkv, case.bias, case.norms, *case.pages, case.positions, case.slots, case.table, case.context, scale=dim**-0.5,
            window=window, splits=splits,
        )  # fmt: skip

    outs = [attend() for _ in range(20)]
    want, keys, values = case.expected(scale=dim**-0.5, window=window)
    assert all(torch.equal(out, outs[0]) for out in outs), "which split ends last must not matter"
    assert (outs[0].double() - want).norm() < tolerance * want.norm()
    for pages, new in zip(case.pages, (keys, values), strict=True):
        stored = pages.flatten(0, 1)[case.slots].double()
        assert (stored - new).norm() < tolerance * new.norm()


@pytest.mark.parametrize(("kind", "tolerance"), [(torch.float32, 3e-3), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize(
    ("kept", "heads", "kv_heads", "dim"),
    [
        *(("fp8", *sizes) for sizes in ((12, 2, 128), (14, 2, 64), (9, 3, 64), (20, 2, 32))),
    ],
)
@pytest.mark.parametrize(
    ("splits", "window", "tile", "warps"),
    [(1, None, 64, 1024), (8, 100, 64, 0), (16, None, 64, 1024), (2, None, 128, 0), (16, 100, 128, 1024)],
)
def test_pages_of_fewer_bits_are_read_as_what_they_stand_for(
    monkeypatch, kind, tolerance, kept, heads, kv_heads, dim, splits, window, tile, warps
):
    """In float32 what is left is the 11 bits of weights and queries, times a score in the latter (1.2e-3 was seen). In bfloat16 a new key
    may be rounded to the number beside."""
    monkeypatch.setitem(new_token._SMALL, "TILE", tile)
    monkeypatch.setattr(new_token, "_MOST_LOADING_WARPS", warps)
    case = make_new_tokens(
        torch.device("cuda"), kind, parts=3, norm=dim == 128, dim=dim, heads=heads, kv_heads=kv_heads, page=64, contexts=CONTEXTS,
        kept=kept,
    )  # fmt: skip
    attention = NewToken(heads, case.cos, case.sin, case.eps)

    def attend():
        return attention(
            case.qkv, case.bias, case.norms, *case.pages, case.positions, case.slots, case.table, case.context, scale=dim**-0.5,
            window=window, splits=splits, scales=case.scales, kept=kept,
        )  # fmt: skip

    outs = [attend() for _ in range(20)]
    want, keys, values = case.expected(scale=dim**-0.5, window=window)
    assert all(torch.equal(out, outs[0]) for out in outs), "which split ends last must not matter"
    assert ((outs[0].double() - want).norm(dim=1) < tolerance * want.norm(dim=1)).all()
    for pages, new in zip(plain_pages(case.pages, case.scales, kept), (keys, values), strict=True):
        assert (pages.flatten(0, 1)[case.slots] - new).norm() < tolerance * new.norm()
