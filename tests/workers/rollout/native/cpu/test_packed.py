import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lockstep.workers.rollout.native.cpu.library import Library
from lockstep.workers.rollout.native.cpu.packed import PackedLinear


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
@torch.no_grad()
def test_packed_layers_compute_what_pytorch_computes_in_float64(compiled: Library, dtype: torch.dtype, bias: bool) -> None:
    """Within 2e-5 of sums over 77 numbers, for sizes that fill no panel, and for every number of rows in a tile and more."""
    torch.manual_seed(0)
    first, second = nn.Linear(77, 50, bias=bias).to(dtype), nn.Linear(77, 50, bias=bias).to(dtype)
    both, gated = PackedLinear(compiled, [first, second]), PackedLinear(compiled, [first, second], gated=True)
    everything = torch.randn(210, 77)
    one, other = (F.linear(everything.double(), x.weight.double(), x.bias.double() if bias else None) for x in (first, second))
    base = torch.randn(210, 100)
    for rows in (*range(1, 14), 97, 210):
        x = everything[:rows]
        torch.testing.assert_close(both(x).double(), torch.cat([one, other], 1)[:rows], atol=2e-5, rtol=0)
        torch.testing.assert_close(gated(x).double(), (F.silu(one) * other)[:rows], atol=2e-5, rtol=0)
        out = base[:rows].clone()
        both.add_to(out, x)
        torch.testing.assert_close(out.double(), (base + torch.cat([one, other], 1))[:rows], atol=2e-5, rtol=0)


@torch.no_grad()
def test_a_row_has_the_same_bits_whatever_the_other_rows_and_the_threads_are(compiled: Library) -> None:
    torch.manual_seed(0)
    layer = PackedLinear(compiled, [nn.Linear(300, 200)])
    x = torch.randn(230, 300)
    expected = layer(x)
    for rows in (1, 2, 7, 12, 13, 40, 96, 97):
        assert torch.equal(layer(x[5 : 5 + rows]), expected[5 : 5 + rows])
    torch.set_num_threads(2)
    try:
        assert torch.equal(layer(x), expected)
    finally:
        torch.set_num_threads(1)
