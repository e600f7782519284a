"""AdaptedLinear: a linear layer with its adapter beside it (LoRA), for a decoder that samples from what trains.

Merged into half-precision weights, an adapter is rounded to their few bits, and the sampler differs from the trainer by far more than by
the rounding of activations. Beside them it is what trains: W x + s B (A x). (cpu/linears.py, whose copy is float32, puts the two together;
gpu/low_rank.py computes the two in one product.)
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class AdaptedLinear(nn.Linear):
    """`linear` with its own weight and bias, and room for A [r, in] and B [out, r]; `scaling` is s."""

    lora_A: nn.Parameter
    lora_B: nn.Parameter

    def __init__(self, linear: nn.Linear, rank: int, scaling: float) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features, self.scaling = linear.in_features, linear.out_features, scaling
        self.weight, self.bias = linear.weight, linear.bias
        for name, shape in (("lora_A", (rank, self.in_features)), ("lora_B", (self.out_features, rank))):
            empty = torch.empty(shape, dtype=linear.weight.dtype, device="meta")
            self.register_parameter(name, nn.Parameter(empty, requires_grad=False))

    def forward(self, x: Tensor) -> Tensor:
        """Rounded where peft's layer rounds; kernels/linear_parts.py rounds less, where layers are kernels of our own."""
        return F.linear(x, self.weight, self.bias) + self.delta(x)

    def delta(self, x: Tensor) -> Tensor:
        """What the adapter adds."""
        return F.linear(F.linear(x, self.lora_A), self.lora_B) * self.scaling


def adapt(model: nn.Module, layers: dict[str, Any]) -> None:
    """Put an AdaptedLinear in the place of every linear layer of `model` that has one of `layers` (peft's, by name) beside it."""
    for name, layer in layers.items():
        parent, _, attribute = name.rpartition(".")
        linear = model.get_submodule(name)
        assert isinstance(linear, nn.Linear)
        adapted = AdaptedLinear(linear, layer.r["default"], layer.scaling["default"])
        setattr(model.get_submodule(parent), attribute, adapted)


def unmerged(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """(name in a model after `adapt`, tensor) from peft's names."""
    for name, tensor in tensors:
        for half in ("lora_A", "lora_B"):
            name = name.replace(f".{half}.default.weight", f".{half}")
        yield name.replace(".base_layer.", "."), tensor
