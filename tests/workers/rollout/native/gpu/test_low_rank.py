"""Adapters beside weights in Triton's interpreter (see test_filters.py); tests/gpu has the compiled kernel."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1 from the start: triton reads it when it is imported", allow_module_level=True)

from lockstep.models.adapted import AdaptedLinear
from lockstep.workers.rollout.native.gpu.fused import _joined, fuse_projections
from lockstep.workers.rollout.native.gpu.low_rank import adapted_product


def make_layers(sizes: list[int], rank: int, bias: bool) -> list[AdaptedLinear]:
    layers = []
    for size in sizes:
        layer = AdaptedLinear(nn.Linear(96, size, bias=bias), rank, 1.5)
        layer.lora_A = nn.Parameter(torch.randn(rank, 96), requires_grad=False)
        layer.lora_B = nn.Parameter(0.1 * torch.randn(size, rank), requires_grad=False)
        layers.append(layer)
    return layers


def fuse(kind: str, layers: list[AdaptedLinear]) -> None:
    """Lay the tensors as the backend does, in a model that has them in the right places."""
    names = {"qkv": ("q_proj", "k_proj", "v_proj"), "gated": ("gate_proj", "up_proj"), "one": ("o_proj",)}[kind]
    layer = nn.Module()
    layer.self_attn, layer.mlp = nn.Module(), nn.Module()
    for name in ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"):
        part = layer.mlp if name in ("gate_proj", "up_proj", "down_proj") else layer.self_attn
        setattr(part, name, layers[names.index(name)] if name in names else nn.Linear(4, 4))
    model = nn.Module()
    model.model = nn.Module()
    model.model.layers = nn.ModuleList([layer])
    fuse_projections(model)  # type: ignore[arg-type]


def in_parts(x: Tensor, weight: Tensor) -> Tensor:
    """[2, rows, outputs] that add up to the product."""
    return torch.stack([x[:, :32] @ weight[:, :32].t(), x[:, 32:] @ weight[:, 32:].t()])


@pytest.mark.parametrize("rows", [1, 37])
@pytest.mark.parametrize("rank", [3, 16])
@pytest.mark.parametrize("kind", ["qkv", "gated", "one"])
@torch.no_grad()
def test_one_product_and_one_kernel_make_all_layers(rows: int, rank: int, kind: str) -> None:
    torch.manual_seed(rows + rank)
    layers = make_layers({"qkv": [128, 64, 64], "gated": [192, 192], "one": [128]}[kind], rank, bias=kind == "qkv")
    x = torch.randn(rows, 96)
    want = [layer(x) for layer in layers]
    whole = nn.functional.silu(want[0]) * want[1] if kind == "gated" else torch.cat(want, 1)
    assert adapted_product(x, layers, _joined, in_parts) is None or len(layers) == 1
    fuse(kind, layers)
    for product in (nn.functional.linear, in_parts):
        got = adapted_product(x, layers, _joined, product, gated=kind == "gated")
        assert got is not None
        torch.testing.assert_close(got, whole, atol=1e-4, rtol=1e-4)
