"""All layers of a pass, and its logits, in one call of decoder.c: with few tokens the way through Python takes longer than some layers."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lockstep.generation.cpu.kernels import Library, Pages, single_blocks
from lockstep.generation.cpu.linears import ADD, GATED, STORE, PackedLinear
from lockstep.generation.cpu.paged import StepBatch
from lockstep.models.attention import Variant, sliding_window


def linears_of(layer: Any) -> list[Any]:
    """The linear layers of a decoder layer: q, k, v, o, gate, up, down."""
    attention = layer.self_attn
    mlp = layer.mlp
    return [
        *(attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj),
        *(mlp.gate_proj, mlp.up_proj, mlp.down_proj),
    ]


def float_weight(norm: Any) -> Any:
    """The weight of a norm in float32; None where there is none."""
    return None if norm is None else norm.weight.detach().float().contiguous()


class Layer:
    """One decoder layer's weights, laid out by `pack`: PackedLinear of the linear layers that it is given."""

    def __init__(self, pack: Callable[..., PackedLinear], module: PreTrainedModel, layer: Any) -> None:
        attention = layer.self_attn
        q, k, v, o, gate, up, down = linears_of(layer)
        self.input_norm = float_weight(layer.input_layernorm)
        self.mlp_norm = float_weight(layer.post_attention_layernorm)
        self.qkv = pack([q, k, v])
        self.out = pack([o])
        self.norms = float_weight(getattr(attention, "q_norm", None)), float_weight(getattr(attention, "k_norm", None))
        """Of queries and keys (Qwen3)."""
        self.variant = Variant(attention.scaling, sliding_window(module, attention))
        self.gate_up = pack([gate, up], gated=True)
        self.down = pack([down])


Last = tuple[Tensor, PackedLinear]
"""What comes after the layers: a norm's weight, and the head."""


class WholePass:
    """`layers` over `pages`, one for each, then `last`; all of them must stay while it is used.

    `sizes`: query heads, key heads and their size.
    """

    def __init__(
        self, library: Library, layers: Sequence[Layer], last: Last, pages: Sequence[Pages], sizes: tuple[int, int, int], eps: float
    ) -> None:
        self._library = library
        self._sizes = sizes
        self._eps = eps
        self._half = pages[0].half
        self._norm = last[0]
        self._head = torch.tensor(last[1].row(STORE))
        self._columns = last[1].columns
        rows = []
        inner = 0
        for layer, own in zip(layers, pages, strict=True):
            products = [*layer.qkv.row(STORE), *layer.out.row(ADD), *layer.gate_up.row(GATED), *layer.down.row(ADD)]
            norms = [0 if norm is None else norm.data_ptr() for norm in (layer.input_norm, layer.mlp_norm, *layer.norms)]
            memory = [own.keys.data_ptr(), own.values.data_ptr()]
            rows.append([*norms, *products, *memory, layer.variant.sliding_window or 0])
            inner = layer.gate_up.columns
        # Of the last pass: asking the system for fresh memory in each takes a twentieth of it.
        self._scratch = torch.empty(0)
        self._logits = torch.empty(0, 0)
        self._table = torch.tensor(rows, dtype=torch.int64)
        self._inner = inner
        (scaling,), dim = {layer.variant.scaling for layer in layers}, sizes[2]
        self._scaling = float(dim**-0.5 if scaling is None else scaling)

    def __call__(self, hidden: Tensor, angles: tuple[Tensor, Tensor], batch: StepBatch, blocks: Tensor, wanted: Tensor) -> Tensor:
        """The logits [W, vocabulary] after the tokens `wanted` [W] int64, ascending, of hidden [N, size] float32, the embedded tokens,
        which is overwritten. The logits are there until the next call."""
        heads, kv_heads, dim = self._sizes
        tokens, size = hidden.shape
        table = batch.page_table
        assert hidden.is_contiguous()
        assert table.is_contiguous()
        assert table.dtype == blocks.dtype == torch.int32
        last_blocks = blocks if len(wanted) == tokens else single_blocks(batch.query_lens, batch.positions, wanted)
        needed = tokens * (size + (2 * heads + 2 * kv_heads) * dim + self._inner)
        if len(self._scratch) < needed:
            self._scratch = torch.empty(needed)
        if len(self._logits) < len(wanted):
            self._logits = torch.empty(len(wanted), self._columns)
        shape = (len(self._table), tokens, len(blocks), len(wanted), table.shape[1], size, self._inner, heads, kv_heads, dim)
        self._library.call(
            "decoder_layers", hidden, self._table, self._norm, self._head, self._logits, *angles, batch.positions, batch.slots, table,
            blocks, wanted, last_blocks, self._scratch, *shape, self._half, self._scaling, self._eps,
        )  # fmt: skip
        return self._logits[: len(wanted)]
