import gc
import weakref

import pytest
import torch
from torch import nn

from lockstep.workers.rollout.native.linears import prepacked


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(160, 192), nn.Linear(160, 192, bias=False)
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
