"""Attention of new tokens in one kernel, compiled, against float64."""

import pytest
import torch
from helpers.new_tokens import make_new_tokens

pytest.importorskip("triton")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from lockstep.workers.rollout.native.gpu.new_token import NewToken

CONTEXTS = (0, 1, 63, 64, 65, 700, 1500, 127)


@pytest.mark.parametrize(("kind", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(12, 2, 128), (14, 2, 64), (9, 3, 64)])
@pytest.mark.parametrize(("splits", "window"), [(1, None), (8, 100), (2, None)])
def test_one_kernel_rotates_stores_attends_and_joins(kind, tolerance, heads, kv_heads, dim, splits, window):
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
