"""Layers with adapters beside them as one product: against the layers themselves."""

import pytest
import torch
from torch import nn

from lockstep.generation.gpu.low_rank import joint, lay_out, room_for
from lockstep.models.lora import AdaptedLinear


def make_layers(ranks: list[int]) -> list[nn.Linear]:
    """Layers of 24 inputs; one of rank 0 has no adapter."""
    layers: list[nn.Linear] = []
    for size, rank in zip((16, 8, 8), ranks, strict=False):
        layer = nn.Linear(24, size, bias=False, dtype=torch.float64)
        if rank:
            layer = AdaptedLinear(layer, rank, 1.5)
            layer.lora_A = nn.Parameter(torch.randn(rank, 24, dtype=torch.float64), requires_grad=False)
            layer.lora_B = nn.Parameter(torch.randn(size, rank, dtype=torch.float64), requires_grad=False)
        layers.append(layer)
    return layers


@pytest.mark.parametrize("ranks", [[3, 3, 3], [4, 0, 2], [0, 8, 0], [8]], ids=str)
@torch.no_grad()
def test_one_product_makes_all_layers(ranks: list[int]) -> None:
    """Also after their weights were written in place, and laid out anew after they moved."""
    torch.manual_seed(0)
    layers = make_layers(ranks)
    assert room_for(layers) == 0
    lay_out(layers)
    room = room_for(layers)
    assert room % 8 == 0
    assert sum(ranks) <= room < sum(ranks) + 8
    for change in ("nothing", "written", "moved"):
        for layer in layers:
            for name, parameter in layer.named_parameters():
                if change == "written":
                    parameter.data.copy_(torch.randn(parameter.shape, dtype=torch.float64))
                elif change == "moved":
                    setattr(layer, name, nn.Parameter(parameter.data.clone(), requires_grad=False))
        if change == "moved":
            assert room_for(layers) == 0
            lay_out(layers)
        x = torch.full((5, 24 + room), torch.nan, dtype=torch.float64)
        x[:, :24] = torch.randn(5, 24)
        got = x @ joint(x, layers).t()
        torch.testing.assert_close(got, torch.cat([layer(x[:, :24]) for layer in layers], 1))


@torch.no_grad()
def test_parameters_are_views_and_no_second_copy() -> None:
    layers = make_layers([4, 4, 4])
    lay_out(layers)
    storages = {p.untyped_storage().data_ptr() for layer in layers for p in layer.parameters()}
    assert len(storages) == 2
