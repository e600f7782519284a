"""TorchBackend: passes through the Hugging Face module, for every model that FusedBackend does not compute.

While it generates on a CPU, linear layers use copies of their weights in oneDNN's layout for products with few rows (see linears.py).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from lockstep.generation.cpu.paged_attention import PagedAttention, StepBatch
from lockstep.generation.cpu.passes import PassBackend
from lockstep.generation.pages import CacheShape
from lockstep.models.lora import AdaptedLinear

BLOCK = 32
"""Tokens computed together where the same results are wanted in any batch."""
_SMALLEST = 128 * 128
"""Weights with fewer numbers are left alone: the call costs more than it saves."""
_TYPICAL_ROWS = 64
"""The number of rows that the layout is chosen for; it serves any number."""
_MOST_ROWS = 128
"""With more rows the plain product is as fast."""


class TorchBackend(PassBackend):
    """See Backend. On any device.

    `shape` is what `model_support.cache_shape` found in the module.

    With `invariant` every token is computed in the same shapes, whatever else is in the batch, so it is rounded alike in any batch. A
    matrix product adds up in an order that depends on its shape, and a sum over keys on how many there are. So a pass is cut into blocks
    of a fixed number of tokens, padded with tokens that nobody reads; a token attends by itself, as in decoding, even when it is part of
    a prompt; and tokens are drawn a row at a time. Then a prompt may be cut anywhere, a sequence may be preempted and computed again, and
    the bits are the same. Experts of a mixture see as many tokens as are routed to them, which depends on the others in the block: such
    models go token by token.
    """

    def __init__(self, module: PreTrainedModel, shape: CacheShape, gpu_memory_utilization: float, invariant: bool = False) -> None:
        super().__init__(module, shape, gpu_memory_utilization, invariant)
        config = module.config.get_text_config()
        experts = (getattr(config, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts"))
        self._block = 1 if any(experts) else BLOCK

    @contextmanager
    def ready(self) -> Iterator[None]:
        with prepacked(self.module):
            yield

    def open(self, num_pages: int) -> None:
        super().open(num_pages)
        assert self._cache is not None
        self._attention = PagedAttention(self._cache)

    def close(self) -> None:
        if self._cache is not None:
            del self._attention
        super().close()

    def forward(self, batch: StepBatch, logits_at: Tensor) -> Tensor:
        if not self._invariant:
            # Without a token to draw, the head is still applied to one: no index means "all" to transformers.
            return self._logits(batch, logits_at if len(logits_at) else torch.zeros(1, dtype=torch.int64))
        rows = torch.repeat_interleave(torch.arange(len(batch.query_lens)), torch.tensor(batch.query_lens))
        whole = (batch.input_ids, batch.positions, batch.slots, batch.page_table[rows])
        wanted = set(logits_at.tolist())
        kept: dict[int, Tensor] = {}
        for start in range(0, len(rows), self._block):
            block = [x[start : start + self._block] for x in whole]
            # Zeros at the end: token 0 at position 0, stored in the scratch page.
            missing = self._block - len(block[0])
            ids, positions, slots, table = (F.pad(x, (0, 0) * (x.dim() - 1) + (0, missing)) for x in block)
            none = torch.empty(0, dtype=torch.int64)
            alone = StepBatch(ids, positions, slots, [1] * self._block, positions.int(), table, none)
            logits = self._logits(alone, torch.arange(self._block))
            kept |= {start + i: logits[i] for i in range(self._block) if start + i in wanted}
        return torch.stack([kept[i] for i in logits_at.tolist()]) if wanted else torch.empty(0)

    def _logits(self, batch: StepBatch, keep: Tensor) -> Tensor:
        assert self._cache is not None, "the backend is closed"
        self._attention.begin(batch)
        device = self.module.device
        out = self.module(
            input_ids=batch.input_ids.to(device)[None],
            position_ids=batch.positions.to(device)[None],
            use_cache=False,
            kv_cache=self._attention,
            logits_to_keep=keep.to(device),
        )
        return out.logits[0]


@contextmanager
def prepacked(module: nn.Module) -> Iterator[int]:
    """Inside, the linear layers of a CPU module use prepacked copies of their weights; gives the bytes of these copies.

    Weights that change inside are not seen. Layers of other classes than nn.Linear and AdaptedLinear, of other types
    than float32 and bfloat16, and modules on another device are left as they are.
    """
    linears = [layer for layer in module.modules() if isinstance(layer, nn.Linear) and _can_be_packed(layer)]
    layers = linears if torch.backends.mkldnn.is_available() else []
    packed: dict[int, Tensor] = {}
    for layer in layers:
        if id(layer.weight) not in packed:
            packed[id(layer.weight)] = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach(), _TYPICAL_ROWS)
        # An attribute of the instance hides the class's forward, and goes away without a trace.
        layer.forward = partial(_linear, layer, packed[id(layer.weight)])  # type: ignore[method-assign]
    try:
        yield sum(layer.weight.nbytes for layer in {id(layer.weight): layer for layer in layers}.values())
    finally:
        for layer in layers:
            del layer.forward


def _can_be_packed(layer: nn.Linear) -> bool:
    if type(layer) not in (nn.Linear, AdaptedLinear):
        return False
    weight = layer.weight
    return weight.device.type == "cpu" and weight.dtype in (torch.float32, torch.bfloat16) and weight.numel() >= _SMALLEST


def _linear(layer: nn.Linear, packed: Tensor, x: Tensor) -> Tensor:
    if x.numel() > _MOST_ROWS * x.shape[-1]:
        out = nn.functional.linear(x, layer.weight, layer.bias)
    else:
        out = torch.ops.mkldnn._linear_pointwise(x, packed, layer.bias, "none", [], "")
    return out + layer.delta(x) if isinstance(layer, AdaptedLinear) else out
