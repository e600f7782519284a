"""PackedLinear: copies of linear layers' weights in the panels of `linear.c`, for the time of one generation.

A matrix product with few rows spends much of its time on rearranging the weight. Decoding makes thousands of them with the same weight, so
it is rearranged once; torch_backend.py does it for models that the C functions do not compute.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.generation.cpu.kernels import Library
from lockstep.models.lora import AdaptedLinear

STORE, ADD, GATED = range(3)
WHOLE, WIDENED, PAIRS = range(3)
_BLOCK = 1 << 26
"""Bytes asked for at once. What is not used of them takes no memory."""
_LINE = 64
"""Tensors begin where a line of the processor's cache does."""


class PackedMemory:
    """Tensors side by side in a few large blocks, in large pages where the system has them: 4 kB pages of one weight cost a product with
    few rows up to a tenth of its time. After `reuse` the blocks are given out again: fresh memory costs more than laying weights out."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self._blocks: list[Tensor] = []
        self.reuse()

    def reuse(self) -> None:
        """Nobody needs the tensors any more that were taken until now."""
        self._number = 0
        self._used = 0

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor of this shape; what is in it is left to chance."""
        count = torch.Size(shape).numel() * dtype.itemsize
        while self._number < len(self._blocks) and len(self._blocks[self._number]) - self._used < count:
            self._number = self._number + 1
            self._used = 0
        if self._number == len(self._blocks):
            self._blocks.append(torch.empty(max(_BLOCK, count), dtype=torch.uint8))
            self._library.call("large_pages", self._blocks[-1], len(self._blocks[-1]))
        taken = self._blocks[self._number][self._used : self._used + count]
        self._used += -(-count // _LINE) * _LINE
        return taken.view(dtype).view(shape)


class PackedLinear:
    """x -> x W^T + bias, in float32, where W is the weights of `layers` one below the other, in float32 or bfloat16.

    Float32 weights that bfloat16 holds exactly (those of a checkpoint written in bfloat16) are packed in bfloat16: the result has the
    same bits. Adapters beside the weights (LoRA) are packed with them, in float32.

    With `gated`, for two layers of the same size: x -> silu(first(x)) * second(x). A row's result has the same bits in any batch.
    The copy is in `memory`, or in memory of its own. With `rounds` x is rounded to bfloat16 where the weights are bfloat16 and the
    processor multiplies that itself; sums stay float32.
    """

    def __init__(
        self,
        library: Library,
        layers: Sequence[nn.Linear],
        gated: bool = False,
        memory: PackedMemory | None = None,
        rounds: bool = False,
    ) -> None:
        whole = any(isinstance(layer, AdaptedLinear) for layer in layers)
        weights = [_weight(layer, whole) for layer in layers]
        dtype = weights[0].dtype
        depth = weights[0].shape[1]
        assert all(weight.dtype == dtype and weight.shape[1] == depth for weight in weights)
        assert dtype in (torch.float32, torch.bfloat16)
        self.gated = gated
        half = dtype == torch.bfloat16
        in_pairs = rounds and half and library.has_pairs and depth % 2 == 0
        is_half = half or all(_fits_bfloat16(library, weight) for weight in weights)
        self.kind = PAIRS if in_pairs else WIDENED if is_half else WHOLE
        self.columns = len(weights[0]) if gated else sum(map(len, weights))
        # The addresses of the columns' weights, in the panels' order; 0 where a panel has more columns than there are.
        rows = _halves([_addresses(weight)[:, None] for weight in weights], library.panel // 2, gated).contiguous()
        kept = torch.float32 if self.kind == WHOLE else torch.bfloat16
        self._panels = (memory or PackedMemory(library)).take((len(rows), depth, library.panel), kept)
        library.call("pack", rows, self._panels, len(rows), depth, int(half), self.kind)
        self._bias = None
        if any(layer.bias is not None for layer in layers):
            pairs = zip(layers, weights, strict=True)
            biases = [torch.zeros(len(w)) if layer.bias is None else layer.bias.detach().float() for layer, w in pairs]
            self._bias = _halves([bias[:, None] for bias in biases], library.panel // 2, gated).contiguous()

    def row(self, mode: int) -> list[int]:
        """`product` of linear.h, of a result that is stored, added, or (gated) neither: for functions that read it while this object is
        there."""
        bias = 0 if self._bias is None else self._bias.data_ptr()
        return [self._panels.data_ptr(), bias, self._panels.shape[1], self.columns, self.kind, mode]


def _weight(layer: nn.Linear, whole: bool) -> Tensor:
    """What is packed of a layer; `whole` in float32, with its adapter in it. That is no rounding that matters: the sums are float32 too."""
    weight = layer.weight.detach().contiguous()
    if not whole:
        return weight
    if isinstance(layer, AdaptedLinear):
        return torch.addmm(weight.float(), layer.lora_B.detach().float(), layer.lora_A.detach().float(), alpha=layer.scaling)
    return weight.float()


def _fits_bfloat16(library: Library, weight: Tensor) -> bool:
    """Whether bfloat16 holds every number of a float32 weight."""
    result = torch.zeros(1, dtype=torch.int64)
    library.call("holds", weight, result, weight.numel())
    return bool(result)


def _addresses(weight: Tensor) -> Tensor:
    """Of each row."""
    return weight.data_ptr() + torch.arange(len(weight)) * (weight.shape[1] * weight.element_size())


def _halves(weights: Sequence[Tensor], lanes: int, gated: bool) -> Tensor:
    """[panels, 2, lanes, inputs]: neighbouring columns, or (gated) columns of the one weight and of the other; zeros at the end."""
    if gated:
        first, second = (F.pad(weight, (0, 0, 0, -len(weight) % lanes)).view(-1, lanes, weight.shape[1]) for weight in weights)
        return torch.stack([first, second], 1)
    whole = torch.cat(list(weights)) if len(weights) > 1 else weights[0]
    return F.pad(whole, (0, 0, 0, -len(whole) % (2 * lanes))).view(-1, 2, lanes, whole.shape[1])
