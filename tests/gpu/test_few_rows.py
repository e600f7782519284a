"""Products with few rows as compiled kernels, against float64; tests/generation/gpu has them in Triton's interpreter."""

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from lockstep.generation.gpu.few_rows import gated_product, partial_products, takes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 16, 17, 33, 48, 64, 65, 96])
@pytest.mark.parametrize(("inputs", "outputs"), [(1536, 2048), (200, 65), (8960, 1536), (576, 960), (896, 9000)])
def test_parts_add_up_to_the_product(dtype, rows, inputs, outputs):
    """Products of 16-bit numbers are exact in float32; what is rounded are the sums."""
    torch.manual_seed(rows)
    x, weight = (torch.randn(n, inputs, device="cuda").to(dtype) for n in (rows, outputs))
    assert takes(x, weight)
    made = partial_products(x, weight).double().sum(0)
    torch.testing.assert_close(made, x.double() @ weight.double().t(), atol=1e-3, rtol=1e-5)


@pytest.mark.parametrize("rows", [1, 17, 32, 33, 48, 64])
@pytest.mark.parametrize(("inputs", "outputs"), [(1536, 8960), (200, 130), (576, 1536)])
def test_a_gated_product_is_rounded_once_after_each_projection_and_once_after_the_gate(rows, inputs, outputs):
    torch.manual_seed(rows)
    x, weight = (torch.randn(n, inputs, device="cuda").bfloat16() for n in (rows, 2 * outputs))
    weight /= inputs**0.5
    gate, up = F.linear(x.double(), weight.double()).chunk(2, 1)
    made, exact = gated_product(x, weight).double(), F.silu(gate) * up
    assert ((made - exact).abs() / exact.abs().clamp_min(0.05)).max() < 4 * 2**-8


@pytest.mark.parametrize(
    ("rows", "width", "taken"), [(4, 100, False), (4, 104, True), (97, 104, False), (32, 2056, True), (33, 2056, False)]
)
def test_the_library_has_many_rows_wide_models_and_what_no_descriptor_can_have(rows, width, taken):
    x, weight = (torch.empty(n, width, device="cuda", dtype=torch.bfloat16) for n in (rows, 4096))
    assert takes(x, weight) == taken
