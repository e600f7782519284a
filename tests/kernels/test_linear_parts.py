"""Linear layers by their tensors against autograd through peft's own layer, in float64."""

import pytest
import torch
from torch import nn

from lockstep.kernels.linear_parts import LinearParts, added_product, gradients, parts_of, products

peft = pytest.importorskip("peft")


def make_layer(*, bias: bool, adapter: bool) -> nn.Module:
    """A linear layer of 12 inputs and 8 outputs, as peft adapts it or plain."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 8, bias=bias))
    if adapter:
        peft.inject_adapter_in_model(peft.LoraConfig(r=3, lora_alpha=5, target_modules=["0"]), model)
        nn.init.normal_(model[0].lora_B["default"].weight)
    return model[0].double()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("adapter", [False, True])
def test_product_and_gradients_are_those_of_the_layer(bias: bool, adapter: bool) -> None:
    layer = make_layer(bias=bias, adapter=adapter)
    parts = parts_of(layer)
    assert parts is not None
    x, grad = (torch.randn(5, size, dtype=torch.float64) for size in (12, 8))
    leaves = [p for p in parts.tensors if p is not None]
    for leaf in leaves:
        leaf.requires_grad_(True)
    x.requires_grad_(True)
    want = layer(x)
    wanted = torch.autograd.grad(want, [x, *leaves], grad)
    with torch.no_grad():
        got, small = products(x, [parts])
        needs = [p is not None for p in parts.tensors]
        dx, made = gradients(grad, x, small, [parts], needs)
    torch.testing.assert_close(got, want)
    assert dx is not None
    torch.testing.assert_close(dx, wanted[0])
    assert [m is not None for m in made] == needs
    for mine, other in zip((m for m in made if m is not None), wanted[1:], strict=True):
        torch.testing.assert_close(mine, other)


@pytest.mark.parametrize("adapter", [False, True])
@torch.no_grad()
def test_a_residual_stream_gets_the_layer_added(adapter: bool) -> None:
    layer = make_layer(bias=False, adapter=adapter)
    parts = parts_of(layer)
    assert parts is not None
    h, x = torch.randn(5, 8, dtype=torch.float64), torch.randn(5, 12, dtype=torch.float64)
    torch.testing.assert_close(added_product(h, x, parts)[0], h + layer(x))


def test_gradients_that_nobody_needs_are_not_made() -> None:
    parts = parts_of(make_layer(bias=True, adapter=True))
    assert parts is not None
    grad, x = torch.randn(5, 8, dtype=torch.float64), torch.randn(5, 12, dtype=torch.float64)
    with torch.no_grad():
        dx, made = gradients(grad, x, products(x, [parts])[1], [parts], [False] * 4, needs_x=False)
    assert dx is None
    assert made == [None] * 4


@torch.no_grad()
def test_layers_of_one_input_share_its_adapters_room() -> None:
    """Of other ranks, and one without an adapter, in bfloat16: s A x is rounded at its own scale, and the sum once."""
    torch.manual_seed(0)
    x = torch.randn(5, 64).bfloat16()
    layers = [
        LinearParts(torch.randn(8, 64).bfloat16(), bias, down, up, 1.5)
        for bias, down, up in (
            (torch.randn(8).bfloat16(), torch.randn(4, 64).bfloat16(), torch.randn(8, 4).bfloat16() / 64),
            (None, None, None),
            (None, torch.randn(3, 64).bfloat16(), torch.randn(8, 3).bfloat16() / 64),
        )
    ]
    made, small = products(x, layers)
    for layer, got, own in zip(layers, made.split(8, 1), small, strict=True):
        want = x.double() @ layer.weight.double().t()
        if layer.bias is not None:
            want += layer.bias.double()
        if layer.down is not None and layer.up is not None and own is not None:
            scaled = 1.5 * x.double() @ layer.down.double().t()
            torch.testing.assert_close(own.double(), scaled, atol=0, rtol=2**-8)
            want += own.double() @ layer.up.double().t()
        torch.testing.assert_close(got.double(), want, atol=1e-4, rtol=2**-8)


def test_adapters_that_are_off_leave_the_plain_layer() -> None:
    layer = make_layer(bias=True, adapter=True)
    layer._disable_adapters = True
    parts = parts_of(layer)
    assert parts is not None
    assert parts.down is None
    assert parts.up is None


@pytest.mark.parametrize("kind", ["dropout", "merged", "other"])
def test_what_is_not_a_plain_sum_has_no_parts(kind: str) -> None:
    layer = make_layer(bias=False, adapter=True)
    if kind == "dropout":
        layer.lora_dropout["default"] = nn.Dropout(0.5)
    elif kind == "merged":
        layer.merge()
    assert parts_of(nn.Embedding(3, 4) if kind == "other" else layer) is None
