"""What lies between the matrix products of a layer, in Triton's interpreter: TRITON_INTERPRET=1 pytest tests/models/test_layer_kernels.py.

tests/gpu/test_fast_layers.py has the compiled kernels.
"""

from __future__ import annotations

import os

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1 from the start: triton reads it when it is imported", allow_module_level=True)

from lockstep.models.layer_kernels import GatedMLP, Project


def assert_close(mine: list[Tensor], want: list[Tensor]) -> None:
    """float32, sums in another order: 1e-6 of the largest."""
    for a, b in zip(mine, want, strict=True):
        assert (a - b).abs().max() < 1e-6 * b.abs().max()


@pytest.mark.parametrize("width", [40, 96, 256, 1000])
def test_a_gated_mlp_and_its_gradients_are_those_of_its_formula(width: int) -> None:
    torch.manual_seed(0)
    shapes = (37, 24), (width, 24), (width, 24), (24, width)
    x, gate, up, down = leaves = [torch.randn(*shape, requires_grad=True) for shape in shapes]
    weights = torch.randn(37, 24)
    mine = GatedMLP.apply(None, *leaves)
    want = (F.silu(x @ gate.t()) * (x @ up.t())) @ down.t()
    assert_close(
        [mine, *torch.autograd.grad((mine * weights).sum(), leaves)], [want, *torch.autograd.grad((want * weights).sum(), leaves)]
    )


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("frozen", [True, False])
def test_projections_of_one_input_are_those_of_each_weight(bias: bool, frozen: bool) -> None:
    """`frozen`: with the second weight, and its bias, out of training."""
    torch.manual_seed(0)
    x = torch.randn(37, 24, requires_grad=True)
    pairs = [(torch.randn(n, 24), torch.randn(n) if bias else None) for n in (32, 16, 8)]
    leaves = [x]
    for number, pair in enumerate(pairs):
        leaves += [p.requires_grad_() for p in pair if p is not None and not (frozen and number == 1)]
    mine = Project.apply(x, *(p for pair in pairs for p in pair))
    want = [F.linear(x, *pair) for pair in pairs]
    weights = [torch.randn_like(y) for y in want]
    gradients = [
        torch.autograd.grad(sum((y * w).sum() for y, w in zip(found, weights, strict=True)), leaves) for found in (mine, want)
    ]
    assert_close([*mine, *gradients[0]], [*want, *gradients[1]])
