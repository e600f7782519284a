import gc
import weakref
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from helpers.rollouts import make_requests, make_rollout, sampling
from helpers.tiny import save_tiny_model
from torch import nn

from benchmarks.one_by_one import multiply
from lockstep.generation.cpu.kernels import Library
from lockstep.generation.cpu.linears import WHOLE, WIDENED, PackedLinear, PackedMemory
from lockstep.generation.cpu.torch_backend import prepacked
from lockstep.models.lora import AdaptedLinear

MIB = 1 << 20


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(160, 192)
        self.second = nn.Linear(160, 192, bias=False)
        self.second.weight = self.first.weight
        self.small = nn.Linear(192, 8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_prepacked_layers_compute_the_same_and_are_put_back(dtype: torch.dtype) -> None:
    """Within float32 rounding of 160 additions, or one bfloat16 step."""
    model = Tied().to(dtype)
    x = torch.randn(2, 7, 160, dtype=dtype)
    expected = [layer(x) for layer in (model.first, model.second)]
    with prepacked(model) as copied:
        assert copied == model.first.weight.nbytes
        for layer, plain in zip((model.first, model.second), expected, strict=True):
            tolerance = 1e-5 if dtype == torch.float32 else 2e-2
            torch.testing.assert_close(layer(x), plain, atol=tolerance, rtol=tolerance)
        assert "forward" in vars(model.first)
        assert "forward" not in vars(model.small)
        held = weakref.ref(model.first.forward)
    gc.collect()
    assert held() is None
    assert not any("forward" in vars(layer) for layer in model.modules())


@torch.no_grad()
def test_a_new_weight_is_seen_by_the_next_context() -> None:
    model = Tied()
    x = torch.randn(3, 160)
    with prepacked(model):
        before = model.first(x)
    model.first.weight.mul_(2)
    with prepacked(model):
        assert not torch.allclose(model.first(x), before)
        torch.testing.assert_close(
            model.first(x), nn.functional.linear(x, model.first.weight, model.first.bias), atol=1e-5, rtol=1e-5
        )


def test_layers_are_put_back_after_an_error() -> None:
    model = Tied()
    with pytest.raises(KeyError), prepacked(model):
        raise KeyError
    assert "forward" not in vars(model.first)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
@torch.no_grad()
def test_packed_layers_compute_what_pytorch_computes_in_float64(compiled: Library, dtype: torch.dtype, bias: bool) -> None:
    """Within 2e-5 of sums over 77 numbers, for sizes that fill no panel, and for every number of rows in a tile and more."""
    torch.manual_seed(0)
    first = nn.Linear(77, 50, bias=bias).to(dtype)
    second = nn.Linear(77, 50, bias=bias).to(dtype)
    both = PackedLinear(compiled, [first, second])
    gated = PackedLinear(compiled, [first, second], gated=True)
    everything = torch.randn(210, 77)
    one, other = (F.linear(everything.double(), x.weight.double(), x.bias.double() if bias else None) for x in (first, second))
    base = torch.randn(210, 100)
    for rows in (*range(1, 14), 25, 97, 210):
        x = everything[:rows]
        torch.testing.assert_close(multiply(compiled, both, x).double(), torch.cat([one, other], 1)[:rows], atol=2e-5, rtol=0)
        torch.testing.assert_close(multiply(compiled, gated, x).double(), (F.silu(one) * other)[:rows], atol=2e-5, rtol=0)
        out = base[:rows].clone()
        multiply(compiled, both, x, out)
        torch.testing.assert_close(out.double(), (base + torch.cat([one, other], 1))[:rows], atol=2e-5, rtol=0)


@torch.no_grad()
def test_a_row_has_the_same_bits_whatever_the_other_rows_and_the_threads_are(compiled: Library) -> None:
    torch.manual_seed(0)
    layer = PackedLinear(compiled, [nn.Linear(300, 200)])
    x = torch.randn(230, 300)
    expected = multiply(compiled, layer, x)
    for rows in (1, 2, 7, 12, 13, 40, 96, 97):
        assert torch.equal(multiply(compiled, layer, x[5 : 5 + rows]), expected[5 : 5 + rows])
    torch.set_num_threads(2)
    try:
        assert torch.equal(multiply(compiled, layer, x), expected)
    finally:
        torch.set_num_threads(1)


@torch.no_grad()
def test_long_sums_round_no_more_than_pytorchs(compiled: Library) -> None:
    """One sum over all inputs, term by term, rounds three times as much."""
    torch.manual_seed(0)
    layer = nn.Linear(1536, 576, bias=False)
    x = torch.randn(32, 1536)
    exact = F.linear(x.double(), layer.weight.double())
    ours, theirs = (
        float((found - exact).square().mean().sqrt())
        for found in (multiply(compiled, PackedLinear(compiled, [layer]), x), layer(x))
    )
    assert ours < 1.3 * theirs


@pytest.mark.parametrize("rows", [1, 5, 40])
@torch.no_grad()
def test_float32_weights_that_bfloat16_holds_take_half_the_memory_and_give_the_same_bits(compiled: Library, rows: int) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(77, 50)
    other = nn.Linear(77, 50)
    layer.weight.data = layer.weight.data.bfloat16().float()
    x = torch.randn(rows, 77)
    exact = PackedLinear(compiled, [layer])
    whole = PackedLinear(compiled, [layer, other])
    assert exact.kind == WIDENED
    assert whole.kind == WHOLE
    assert torch.equal(multiply(compiled, exact, x), multiply(compiled, whole, x)[:, :50])


@pytest.mark.parametrize("depth", [78, 300])
@torch.no_grad()
def test_products_of_bfloat16_round_what_enters_them_and_nothing_else(compiled: Library, depth: int) -> None:
    """Within 2e-5 of the rounded rows' sums in float64; a row has the same bits whatever the other rows are. An odd number of inputs has no
    pairs and rounds nothing."""
    if not compiled.has_pairs:
        pytest.skip("this processor does not multiply bfloat16")
    torch.manual_seed(0)
    first, second = (nn.Linear(depth, 50, dtype=torch.bfloat16) for _ in range(2))
    both, gated = (PackedLinear(compiled, [first, second], gated, rounds=True) for gated in (False, True))
    everything = torch.randn(100, depth)
    one, other = (F.linear(everything.bfloat16().double(), x.weight.double(), x.bias.double()) for x in (first, second))
    whole = multiply(compiled, both, everything)
    for rows in (*range(1, 14), 97, 100):
        x = everything[:rows]
        torch.testing.assert_close(multiply(compiled, both, x).double(), torch.cat([one, other], 1)[:rows], atol=2e-5, rtol=0)
        torch.testing.assert_close(multiply(compiled, gated, x).double(), (F.silu(one) * other)[:rows], atol=2e-5, rtol=0)
        assert torch.equal(multiply(compiled, both, x), whole[:rows])
    out = torch.ones(100, 100)
    multiply(compiled, both, everything, out)
    torch.testing.assert_close(out, 1 + whole)
    odd = nn.Linear(depth - 1, 50, dtype=torch.bfloat16)
    exact = F.linear(everything[:, 1:].double(), odd.weight.double(), odd.bias.double())
    found = multiply(compiled, PackedLinear(compiled, [odd], rounds=True), everything[:, 1:])
    torch.testing.assert_close(found.double(), exact, atol=2e-5, rtol=0)


def adapted(inputs: int, outputs: int, rank: int, bias: bool, dtype: torch.dtype) -> AdaptedLinear:
    layer = AdaptedLinear(nn.Linear(inputs, outputs, bias=bias, dtype=dtype), rank, 1.25)
    for name, shape in (("lora_A", (rank, inputs)), ("lora_B", (outputs, rank))):
        setattr(layer, name, nn.Parameter(0.2 * torch.randn(shape, dtype=dtype), requires_grad=False))
    return layer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("gated", [False, True])
@torch.no_grad()
def test_adapters_are_packed_with_their_weights_in_float32(compiled: Library, dtype: torch.dtype, gated: bool) -> None:
    """Against float64; a layer without an adapter among them. A row has the same bits in any batch."""
    torch.manual_seed(0)
    layers: list[nn.Linear] = [adapted(96, 80, 3, not gated, dtype), adapted(96, 80, 16, False, dtype)]
    if not gated:
        layers.insert(1, nn.Linear(96, 40, dtype=dtype))
    packed = PackedLinear(compiled, layers, gated)
    x = torch.randn(9, 96)

    def plain(layer: nn.Linear) -> torch.Tensor:
        out = F.linear(x.double(), layer.weight.double(), None if layer.bias is None else layer.bias.double())
        return out + layer.double().delta(x.double()) if isinstance(layer, AdaptedLinear) else out

    want = [plain(layer) for layer in layers]
    whole = F.silu(want[0]) * want[1] if gated else torch.cat(want, 1)
    got = multiply(compiled, packed, x)
    torch.testing.assert_close(got.double(), whole, atol=1e-4, rtol=1e-4)
    assert torch.equal(multiply(compiled, packed, x[4:6]), got[4:6])
    if not gated:
        out = torch.ones_like(got)
        multiply(compiled, packed, x, out)
        torch.testing.assert_close(out.double(), 1 + whole, atol=1e-4, rtol=1e-4)


def test_tensors_lie_side_by_side_on_lines_of_the_cache_and_in_the_same_places_after_reuse(compiled: Library) -> None:
    memory = PackedMemory(compiled)
    shapes = [
        ((3, 5), torch.float32),
        ((7,), torch.bfloat16),
        ((40 * MIB,), torch.uint8),
        ((100 * MIB,), torch.uint8),
        ((9,), torch.float32),
    ]
    first = [memory.take(shape, dtype) for shape, dtype in shapes]
    for tensor, (shape, dtype) in zip(first, shapes, strict=True):
        assert (tensor.shape, tensor.dtype) == (shape, dtype)
        assert tensor.data_ptr() % 64 == 0
    ends = sorted((tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor in first)
    assert all(end <= start for (_, end), (start, _) in pairwise(ends))
    memory.reuse()
    assert [memory.take(shape, dtype).data_ptr() for shape, dtype in shapes] == [tensor.data_ptr() for tensor in first]


def test_the_memory_of_packed_weights_is_used_again_and_given_back_with_the_pages(tmp_path: Path, compiled: Library) -> None:
    rollout = make_rollout(save_tiny_model(tmp_path))
    places = []
    for _ in range(2):
        with rollout.backend.ready():
            places.append(rollout.backend._last[1].row(0)[0])
    assert places[0] == places[1]
    rollout.generate(make_requests(2), sampling(stop_token_ids=()))
    block = weakref.ref(rollout.backend._memory._blocks[0])
    rollout.sleep()
    gc.collect()
    assert block() is None
