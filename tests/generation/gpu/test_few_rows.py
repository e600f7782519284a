"""Products with few rows in Triton's interpreter (see test_kernels.py), against plain torch."""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1 from the start: triton reads it when it is imported", allow_module_level=True)

from lockstep.generation.gpu.few_rows import gated_product, partial_products


@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(1, 96, 200), (5, 700, 72), (33, 4100, 64), (97, 136, 65), (3, 320, 8200)])
def test_parts_add_up_to_the_product(rows: int, inputs: int, outputs: int) -> None:
    torch.manual_seed(rows)
    x = torch.randn(rows, inputs)
    weight = torch.randn(outputs, inputs)
    parts = partial_products(x, weight)
    assert len(parts) == {96: 1, 700: 5, 4100: 10, 136: 1, 320: 1}[inputs]
    torch.testing.assert_close(parts.sum(0).double(), x.double() @ weight.double().t(), atol=2e-4, rtol=1e-5)


@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(1, 96, 200), (17, 300, 40), (49, 70, 130)])
def test_a_gated_product_is_silu_of_one_half_times_the_other(rows: int, inputs: int, outputs: int) -> None:
    torch.manual_seed(rows)
    x = torch.randn(rows, inputs)
    weight = torch.randn(2 * outputs, inputs) / inputs**0.5
    gate, up = (x.double() @ weight.double().t()).chunk(2, 1)
    torch.testing.assert_close(gated_product(x, weight).double(), torch.nn.functional.silu(gate) * up, atol=1e-5, rtol=1e-5)
