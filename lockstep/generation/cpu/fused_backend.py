"""FusedBackend: the common families on a CPU, their layers as a few C functions over packed weights.

All layers of a pass, and its logits, are one call of decoder.c (`WholePass`): with few tokens the way through Python takes longer than some
layers. The weights are copies of the module's, made for each generation; their memory is given back with the pages. Activations are float32
whatever the weights are; only what enters a product is rounded where the weights are bfloat16 and the processor multiplies that itself.
Every function computes a token by itself, in one order, so tokens and log-probs have the same bits in any batch.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from operator import add
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from lockstep.config.sampling import SamplingParams
from lockstep.generation.cpu.kernels import Library, Pages, attention_blocks, draw, library, single_blocks, uniforms
from lockstep.generation.cpu.linears import ADD, GATED, STORE, PackedLinear, PackedMemory
from lockstep.generation.cpu.paged_attention import StepBatch
from lockstep.generation.cpu.passes import PassBackend, numbers_of
from lockstep.generation.model_support import is_fusable
from lockstep.generation.pages import CacheShape, KVCache
from lockstep.generation.scheduler import Sample
from lockstep.models.attention import Variant, sliding_window
from lockstep.models.lora import AdaptedLinear


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


def fused_library(module: PreTrainedModel) -> Library | None:
    """The functions that FusedBackend needs, if it computes this model on this machine, and faster than PyTorch."""
    if module.device.type != "cpu" or not is_fusable(module.config):
        return None
    if module.dtype == torch.bfloat16 and torch.cpu._is_amx_tile_supported():
        return None  # oneDNN multiplies with tiles, these functions do not
    if module.dtype not in (torch.float32, torch.bfloat16):
        return None
    parts: Any = [module.lm_head, *(part for layer in module.model.layers for part in linears_of(layer))]
    # Whatever changes how a layer computes is a class of its own.
    return library() if all(type(part) in (nn.Linear, AdaptedLinear) for part in parts) else None


class FusedBackend(PassBackend):
    """See Backend. `library` is what `fused_library` gave for the module. Passes are computed inside `ready` only."""

    def __init__(
        self,
        module: PreTrainedModel,
        shape: CacheShape,
        library: Library,
        gpu_memory_utilization: float,
        batch_invariant: bool,
    ) -> None:
        super().__init__(module, shape, gpu_memory_utilization, batch_invariant)
        assert shape.page_size == library.page_size
        self._library = library
        self._heads: int = module.config.num_attention_heads
        self._eps: float = module.config.rms_norm_eps
        self._layers: list[Layer] = []
        self._whole: tuple[KVCache, WholePass] | None = None
        """The pages, and what computes all layers over them: it has their addresses."""
        self._memory = PackedMemory(library)
        """Of the packed weights: kept as long as the pages are."""

    def open(self, num_pages: int) -> None:
        super().open(num_pages)
        assert self._cache is not None
        pool = self._cache.pool
        self._library.call("large_pages", pool, pool.numel() * pool.element_size())

    def close(self) -> None:
        super().close()
        self._memory = PackedMemory(self._library)

    @contextmanager
    def ready(self) -> Iterator[None]:
        model: Any = self.module.model
        self._memory.reuse()
        pack = partial(PackedLinear, self._library, memory=self._memory, rounds=True)
        self._layers = [Layer(pack, self.module, layer) for layer in model.layers]
        self._last = float_weight(model.norm), pack([self.module.lm_head])
        self._angles = (torch.empty(0), torch.empty(0))
        try:
            yield
        finally:
            self._layers = []
            self._whole = None
            del self._last, self._angles

    def forward(self, batch: StepBatch, logits_at: Tensor) -> Tensor:
        assert self._cache is not None, "the backend is closed"
        assert self._layers, "the weights are packed inside `ready` only"
        lib = self._library
        dim = self.shape.head_dim
        kv_heads = self.shape.num_kv_heads
        contexts = batch.context_lens.tolist()
        model = cast(Any, self.module.model)
        angles = self._angles_up_to(max(map(add, contexts, batch.query_lens)) - 1)
        blocks = attention_blocks(batch.query_lens, contexts, self._heads // kv_heads)
        hidden = F.embedding(batch.input_ids, model.embed_tokens.weight).float()
        if self._whole is None or self._whole[0] is not self._cache:
            pages = [Pages(*self._cache.layer(number)) for number in range(len(self._layers))]
            self._whole = self._cache, WholePass(lib, self._layers, self._last, pages, (self._heads, kv_heads, dim), self._eps)
        return self._whole[1](hidden, angles, batch, blocks, logits_at)

    def _angles_up_to(self, position: int) -> tuple[Tensor, Tensor]:
        """cos and sin [positions, D / 2] of at least the positions up to `position`; both halves of a head turn alike."""
        if len(self._angles[0]) <= position:
            places = torch.arange(-(-(position + 1) // 1024) * 1024)
            model: Any = self.module.model
            cos, sin = model.rotary_emb(torch.empty(0), places[None])
            half = self.shape.head_dim // 2
            self._angles = (cos[0, :, :half].contiguous(), sin[0, :, :half].contiguous())
        return self._angles

    def draw_alike(self, logits: Tensor, draws: Sequence[Sample], params: SamplingParams) -> tuple[Tensor, Tensor]:
        if params.truncates or params.penalises:
            return super().draw_alike(logits, draws, params)
        return draw(self._library, logits, uniforms(self._library, *numbers_of(draws)), params.temperature)
