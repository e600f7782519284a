"""PackedLinear: copies of linear layers' weights in the panels of `linear.c`, for the time of one generation.

A matrix product with few rows spends much of its time on rearranging the weight. Decoding makes thousands of them with the same weight, so
it is rearranged once; prepacked.py does it for models that the C functions do not compute.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.models.adapted import AdaptedLinear
from lockstep.workers.rollout.native.cpu.kernels import Library

_STORE, _ADD, _GATED = range(3)


class PackedLinear:
    """x -> x W^T + bias, in float32, where W is the weights of `layers` one below the other; weights in float32 or bfloat16. Those in
    float32 that bfloat16 holds exactly, as of a checkpoint that was written so, are packed in that: the result has the same bits.
    Adapters beside the weights (LoRA) are packed with them, in float32.

    With `gated`, for two layers of the same size: x -> silu(first(x)) * second(x). A row's result has the same bits in any batch.
    """

    def __init__(self, library: Library, layers: Sequence[nn.Linear], gated: bool = False) -> None:
        whole = any(isinstance(layer, AdaptedLinear) for layer in layers)
        weights = [_weight(layer, whole) for layer in layers]
        if all(weight.dtype == torch.float32 and torch.equal(weight, weight.bfloat16().float()) for weight in weights):
            weights = [weight.bfloat16() for weight in weights]  # the same numbers, and half of the memory to read
        assert all(weight.dtype == weights[0].dtype and weight.dtype in (torch.float32, torch.bfloat16) for weight in weights)
        self._library, self._gated, self._half = library, gated, weights[0].dtype == torch.bfloat16
        self.columns = len(weights[0]) if gated else sum(map(len, weights))
        # [panels, 2 halves, lanes, inputs]
        halves = _halves(weights, library.panel // 2, gated)
        # In bfloat16 the two halves are the two halves of a 32-bit word.
        self._panels = (halves.permute(0, 3, 2, 1) if self._half else halves.permute(0, 3, 1, 2)).contiguous()
        self._bias = None
        if any(layer.bias is not None for layer in layers):
            biases = [
                (torch.zeros(len(w)) if (b := layer.bias) is None else b.detach().float())
                for layer, w in zip(layers, weights, strict=True)
            ]
            self._bias = _halves([bias[:, None] for bias in biases], library.panel // 2, gated).contiguous()

    @property
    def addresses(self) -> tuple[int, int]:
        """Of the panels, and of the bias or 0: for functions that read them while this object is there."""
        return self._panels.data_ptr(), 0 if self._bias is None else self._bias.data_ptr()

    @property
    def half(self) -> bool:
        """Whether the weights are bfloat16."""
        return self._half

    def __call__(self, x: Tensor) -> Tensor:
        """x [N, inputs] float32 -> [N, columns]."""
        return self._into(x, torch.empty(len(x), self.columns), _GATED if self._gated else _STORE)

    def add_to(self, out: Tensor, x: Tensor) -> None:
        """out [N, columns] += this layer of x [N, inputs]."""
        assert not self._gated
        self._into(x, out, _ADD)

    def _into(self, x: Tensor, out: Tensor, mode: int) -> Tensor:
        assert x.dtype == out.dtype == torch.float32
        assert x.stride(1) == out.stride(1) == 1
        rows, depth = x.shape
        sizes = (x.stride(0), out.stride(0), rows, depth, self.columns, int(self._half), mode)
        self._library.call("linear", x, self._panels, self._bias, out, *sizes)
        return out


def _weight(layer: nn.Linear, whole: bool) -> Tensor:
    """What is packed of a layer; `whole` in float32, with its adapter in it. That is no rounding that matters: the sums are float32 too."""
    weight = layer.weight.detach()
    if not whole:
        return weight
    if isinstance(layer, AdaptedLinear):
        return torch.addmm(weight.float(), layer.lora_B.detach().float(), layer.lora_A.detach().float(), alpha=layer.scaling)
    return weight.float()


def _halves(weights: Sequence[Tensor], lanes: int, gated: bool) -> Tensor:
    """[panels, 2, lanes, inputs]: neighbouring columns, or (gated) columns of the one weight and of the other; zeros at the end."""
    if gated:
        first, second = (F.pad(weight, (0, 0, 0, -len(weight) % lanes)).view(-1, lanes, weight.shape[1]) for weight in weights)
        return torch.stack([first, second], 1)
    whole = torch.cat(list(weights)) if len(weights) > 1 else weights[0]
    return F.pad(whole, (0, 0, 0, -len(whole) % (2 * lanes))).view(-1, 2, lanes, whole.shape[1])
