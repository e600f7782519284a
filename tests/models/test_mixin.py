import pytest
import torch
from torch import nn

from lockstep.models.mixin import extend_class, replace_class


class Doubled:
    def forward(self, x):
        return 2 * super().forward(x)


class Negative(nn.Linear):
    def forward(self, x):
        return -super().forward(x)


def test_a_mixin_comes_before_the_class_of_a_module_and_shares_its_parameters():
    layer = nn.Linear(3, 2)
    weight = layer.weight
    x = torch.randn(4, 3)
    before = layer(x)
    extend_class(layer, Doubled)
    assert torch.equal(layer(x), 2 * before)
    assert layer.weight is weight
    assert isinstance(layer, nn.Linear)
    assert isinstance(layer, Doubled)
    assert (type(layer).__name__, type(layer).__module__) == ("Linear", nn.Linear.__module__)


def test_layers_of_a_kind_stay_of_one_kind():
    """torch.compile compiles each class anew."""
    one, other = nn.Linear(3, 2), nn.Linear(5, 1)
    extend_class(one, Doubled)
    extend_class(other, Doubled)
    assert type(one) is type(other) is not nn.Linear
    assert type(nn.Linear(1, 1)) is nn.Linear


def test_a_class_is_replaced_by_a_subclass_only():
    layer = nn.Linear(3, 2)
    x = torch.randn(4, 3)
    before = layer(x)
    replace_class(layer, Negative)
    assert torch.equal(layer(x), -before)
    with pytest.raises(AssertionError):
        replace_class(nn.LayerNorm(3), Negative)
