# mypy: disable-error-code="no-untyped-def"
# (Triton kernels take no Python types.)
"""FusedDecoder: the common families with one matrix product for q, k, v and one for gate, up, and a few small Triton kernels.

Llama, Mistral, Qwen2 and Qwen3 share one layer: norm, attention with rotary positions, norm, gated MLP; in Mixtral and Qwen3-MoE the MLP
is a mixture of experts (kernels/experts.py). The parameters are the Hugging Face module's own; only the order of the arithmetic is
written here. Results are rounded where training rounds them (models/fast_layers.py), and the residual stream is float32. Every other
family goes through `hf_layers.py`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from transformers import PreTrainedModel

from lockstep.generation.gpu.attention import SharedPrefixes, num_splits, paged_attention
from lockstep.generation.gpu.block_attention import block_attention, block_size
from lockstep.generation.gpu.early import begin, early
from lockstep.generation.gpu.few_rows import MOST_GATED_ROWS, gated_product, partial_products, takes
from lockstep.generation.gpu.float8 import packed_scales
from lockstep.generation.gpu.low_rank import joint, lay_out, room_for
from lockstep.generation.gpu.new_token import MOST_PAIRS, NewToken, cuts
from lockstep.generation.gpu.prefill import PromptRows, packed_prompt_attention
from lockstep.generation.gpu.store_heads import rotate_and_store
from lockstep.generation.pages import KVCache
from lockstep.kernels.experts import experts_product, pairs_of
from lockstep.kernels.linear_parts import added
from lockstep.models.attention import Variant, sliding_window
from lockstep.models.fast_layers import is_mixture
from lockstep.models.lora import AdaptedLinear
from lockstep.models.routers import routers

Attend = Callable[[int, Any, Tensor, Tensor | None], Tensor]
"""Number of a layer, its attention module, product of its projections and the bias that is still to be added -> [N, heads D]."""


def fuse_projections(module: PreTrainedModel) -> None:
    """Move q, k, v and gate, up of each layer into one storage each, those with adapters as `low_rank.lay_out` does; the parameters become
    views of it. No second copy stays.

    Only for a module whose parameters are its own: a trainer's would no longer be the tensors that its optimizer holds.
    """
    for layer in module.model.layers:
        for linears in _groups(layer):
            groups = [[linear.bias for linear in linears]]
            if any(isinstance(linear, AdaptedLinear) for linear in linears):
                lay_out(linears)
            else:
                groups.append([linear.weight for linear in linears])
            for parameters in groups:
                if parameters[0] is not None and _joined(parameters) is None:
                    whole = torch.cat([p.data for p in parameters])
                    for parameter, part in zip(parameters, whole.split([len(p) for p in parameters]), strict=True):
                        parameter.data = part


def _groups(layer: Any) -> list[list[Any]]:
    """The layers of one input."""
    attention = layer.self_attn
    mlp = layer.mlp
    of_mlp = [] if is_mixture(mlp) else [[mlp.gate_proj, mlp.up_proj]]
    return [[attention.q_proj, attention.k_proj, attention.v_proj], *of_mlp]


def _joined(parameters: Sequence[Tensor]) -> Tensor | None:
    """The parameters as one tensor along the first dimension, if they lie end to end in one storage."""
    first = parameters[0]
    place = parameters[0].data_ptr()
    for parameter in parameters:
        if parameter.data_ptr() != place or not parameter.is_contiguous():
            return None
        place += parameter.nbytes
    rows = sum(len(p) for p in parameters)
    if first.untyped_storage().data_ptr() != parameters[-1].untyped_storage().data_ptr():
        return None
    return torch.as_strided(first.data, (rows, *first.shape[1:]), first.stride(), first.storage_offset())


class FusedDecoder:
    """Logits of packed tokens, with keys and values written to the pages. See `hf_layers.HFDecoder` for the same with any family."""

    def __init__(self, module: PreTrainedModel, cache: KVCache, max_positions: int) -> None:
        self._module = module
        self._model = module.model
        self._cache = cache
        config = module.config
        self._eps: float = config.rms_norm_eps
        self.num_heads: int = config.num_attention_heads
        self._kv_heads = cache.shape.num_kv_heads
        self._dim = cache.shape.head_dim
        self._routers = {router: number for number, router in enumerate(routers(module))}
        self.block = block_size(self.num_heads, self._kv_heads)
        """Tokens of a block in `hidden`."""
        positions = torch.arange(max_positions, device=cache.pool.device)[None]
        like = torch.empty(0, dtype=cache.shape.dtype, device=cache.pool.device)
        cos, sin = self._model.rotary_emb(like, positions)
        half = self._dim // 2  # both halves are alike
        self._cos = cos[0, :, :half].contiguous()
        self._sin = sin[0, :, :half].contiguous()
        self._new_token = NewToken(self.num_heads, self._cos, self._sin, self._eps)

    def decode(
        self,
        tokens: Tensor,
        positions: Tensor,
        slots: Tensor,
        page_table: Tensor,
        context_lens: Tensor,
        shared: SharedPrefixes | None,
        long: bool = False,
    ) -> Tensor:
        """[rows, vocabulary] float32 after one new token for each row, all of them of different sequences. `long`: see `num_splits`."""
        if len(tokens) * self._kv_heads > MOST_PAIRS:
            return self.logits(self.hidden(tokens, positions, slots, page_table, context_lens, shared, long))
        kept = self._cache.shape.kept
        splits = cuts(len(tokens), self._kv_heads, kept)
        if long and kept == "auto":
            splits = num_splits(len(tokens), self._kv_heads, long)

        def attend(number: int, attention: Any, qkv: Tensor, bias: Tensor | None) -> Tensor:
            norms = (attention.q_norm.weight, attention.k_norm.weight) if _has_norms(attention) else None
            return self._new_token(
                qkv, bias, norms, *self._cache.layer(number), positions, slots, page_table, context_lens,
                scale=attention.scaling, window=sliding_window(self._module, attention), splits=splits,
                scales=self._scales(number), kept=kept,
            )  # fmt: skip

        return self.logits(self._layers(tokens, slots, attend))

    def hidden(
        self,
        tokens: Tensor,
        positions: Tensor,
        slots: Tensor,
        page_table: Tensor,
        context_lens: Tensor,
        shared: SharedPrefixes | None = None,
        long: bool = False,
    ) -> Tensor:
        """[rows, hidden] after one new token for each row; or, with a line of `page_table` for several rows, after blocks of tokens."""
        kernel: Any = paged_attention
        options: dict[str, Any] = {"shared": shared, "splits": num_splits(len(tokens), self._kv_heads, long)}
        if len(page_table) < len(tokens):
            kernel = block_attention
            options = {}
        options["kept"] = self._cache.shape.kept

        def attend(number: int, attention: Any, qkv: Tensor, bias: Tensor | None) -> Tensor:
            query, _, _ = self._rotate_and_store(qkv, bias, positions, slots, number, attention)
            pages = self._cache.layer(number)
            window = sliding_window(self._module, attention)
            options["scales"] = self._scales(number)
            out: Tensor = kernel(query, *pages, page_table, context_lens, scale=attention.scaling, window=window, **options)
            return out.flatten(1)

        return self._layers(tokens, slots, attend)

    def prefill(self, tokens: Tensor, positions: Tensor, slots: Tensor, rows: PromptRows) -> Tensor:
        """[rows, vocabulary] float32 after whole sequences that lie end to end."""

        def attend(number: int, attention: Any, qkv: Tensor, bias: Tensor | None) -> Tensor:
            heads = self._rotate_and_store(qkv, bias, positions, slots, number, attention)
            variant = Variant(attention.scaling, sliding_window(self._module, attention))
            pages = self._cache.layer(number)
            scales = self._scales(number)
            return packed_prompt_attention(*heads, *pages, rows, variant, scales).flatten(1)

        return self.logits(self._layers(tokens, slots, attend)[rows.wanted])

    def release(self) -> None:
        """The module was not changed."""

    def _scales(self, number: int) -> Tensor | None:
        """Of one layer [num_pages, kv_heads, page_size, 2], where keys and values are kept in fewer bits."""
        return None if self._cache.scales is None else self._cache.scales[number]

    def _layers(self, tokens: Tensor, slots: Tensor, attend: Attend) -> Tensor:
        """[N, hidden] after the last norm."""
        embedding = self._model.embed_tokens.weight
        hidden = torch.empty(len(tokens), embedding.shape[1], dtype=torch.float32, device=embedding.device)
        update = None
        for number, layer in enumerate(self._model.layers):
            attention = layer.self_attn
            mlp = layer.mlp
            groups = _groups(layer)
            begun = (tokens.contiguous(), embedding) if number == 0 else None
            x = self._add_norm(hidden, update, layer.input_layernorm.weight, room_for(groups[0]), begun)
            qkv, bias = _project(x, groups[0])
            update = _add_linear(hidden, attend(number, attention, qkv, bias), attention.o_proj)
            x = self._add_norm(hidden, update, layer.post_attention_layernorm.weight, sum(map(room_for, groups[1:])))
            update = None
            if is_mixture(mlp):
                self._add_experts(hidden, x, mlp, slots)
            else:
                update = _add_linear(hidden, _gated(x, mlp), mlp.down_proj)
        return self._add_norm(hidden, update, self._model.norm.weight)

    def _add_experts(self, hidden: Tensor, x: Tensor, mlp: Any, slots: Tensor) -> None:
        _, weights, chosen = mlp.gate(x)
        if self._cache.experts is not None:
            self._cache.experts.flatten(0, 1)[slots, self._routers[mlp.gate]] = chosen.to(torch.int16)
        experts = mlp.experts
        pairs = pairs_of(chosen, experts.num_experts)
        experts_product(hidden, x, pairs, weights, experts.gate_up_proj, experts.down_proj, out=hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, vocabulary] float32."""
        weight: Tensor = self._module.lm_head.weight
        if hidden.is_cuda and hidden.dtype != torch.float32:
            return torch.mm(hidden, weight.t(), out_dtype=torch.float32)  # what the product sums up in, not rounded again
        return F.linear(hidden, weight).float()

    def _add_norm(
        self, hidden: Tensor, update: Tensor | None, weight: Tensor, room: int = 0, begun: tuple[Tensor, Tensor] | None = None
    ) -> Tensor:
        """hidden (float32) += update, in place; returns RMSNorm(hidden) * weight in the weight's type, with `room` columns behind it.
        `update` [N, hidden], or [parts, N, hidden] that add up to it. `begun`: tokens and embeddings that hidden becomes first."""
        size = hidden.shape[1]
        out = torch.empty(len(hidden), size + room, dtype=weight.dtype, device=hidden.device)
        parts = 0 if update is None else update.shape[0] if update.dim() == 3 else 1
        _add_norm_kernel[(len(hidden),)](
            hidden, hidden if update is None else update, weight, out, *(begun or (hidden, hidden)), self._eps, hidden.numel(),
            out.stride(0), N=size, BLOCK=triton.next_power_of_2(size), PARTS=parts, BEGINS=begun is not None,
            num_warps=8 if len(hidden) <= 128 else 4, **early(hidden),
        )  # fmt: skip
        return out

    def _rotate_and_store(
        self, qkv: Tensor, bias: Tensor | None, positions: Tensor, slots: Tensor, number: int, attention: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value [N, heads, D] with positions in them, the latter two also in their slots, and rounded as they are there.

        `qkv` [N, (heads + 2 kv_heads) D] is changed in place; or it is [parts, N, ...] that add up, with `bias`, to it.
        """
        heads = self.num_heads
        kv_heads = self._kv_heads
        dim = self._dim
        parts = qkv.shape[0] if qkv.dim() == 3 else 0
        rows, width = qkv.shape[-2:]
        out = qkv if not parts else torch.empty(rows, width, dtype=self._cache.shape.dtype, device=qkv.device)
        keys, values = self._cache.layer(number)
        scales = self._scales(number)
        norm = _has_norms(attention)
        rotate_and_store[(rows,)](
            qkv, qkv if bias is None else bias, out, self._cos, self._sin, positions, slots, keys, values,
            packed_scales(scales, out),
            attention.q_norm.weight if norm else out, attention.k_norm.weight if norm else out, self._eps, width, rows * width,
            HEADS=heads, KV_HEADS=kv_heads, BLOCK_H=triton.next_power_of_2(heads + kv_heads), D=dim,
            HALF=triton.next_power_of_2(dim // 2), BLOCK_V=triton.next_power_of_2(kv_heads * dim), NORM=norm, PARTS=parts,
            BIAS=parts > 0 and bias is not None, PAGE=keys.shape[1], KEPT=self._cache.shape.kept, num_warps=4 if heads > 16 else 2,
        )  # fmt: skip
        query, key, value = out.view(rows, -1, dim).split([heads, kv_heads, kv_heads], dim=1)
        return query, key, value


def _has_norms(attention: Any) -> bool:
    """Whether heads are normed before they are rotated (Qwen3)."""
    return getattr(attention, "q_norm", None) is not None


def _weight_of(x: Tensor, linears: Sequence[Any]) -> Tensor | None:
    """What x is multiplied with to get the linear maps of it side by side, where that is one tensor."""
    if room_for(linears):
        return joint(x, linears)
    if any(isinstance(linear, AdaptedLinear) for linear in linears):
        return None
    return _joined([linear.weight for linear in linears])


def _project(x: Tensor, linears: Sequence[Any]) -> tuple[Tensor, Tensor | None]:
    """The linear maps of one input, side by side; with few rows in parts, and the bias that is still to be added. x has `room_for` what
    its product needs."""
    weight = _weight_of(x, linears)
    if weight is not None and takes(x, weight):
        return partial_products(x, weight, lets_first=True), _bias_of(linears)
    return _side_by_side(x, linears, weight), None


def _side_by_side(x: Tensor, linears: Sequence[Any], weight: Tensor | None) -> Tensor:
    """The same by the library, in one product where their weights are one tensor."""
    if weight is None:
        return torch.cat([linear(x) for linear in linears], dim=-1)
    return F.linear(x, weight, _bias_of(linears))


def _bias_of(linears: Sequence[Any]) -> Tensor | None:
    """Of linear maps whose weights are one tensor."""
    return None if linears[0].bias is None else _joined([linear.bias for linear in linears])


def _add_linear(hidden: Tensor, x: Tensor, linear: Any) -> Tensor | None:
    """Add the linear map of x to `hidden`; or return it, in parts that add up to it with few rows, for the next kernel to add."""
    if linear.bias is not None:
        return linear(x)
    update = partial_products(x, linear.weight) if takes(x, linear.weight) else None
    if update is None:
        added(hidden, x, linear.weight, out=hidden)
    if isinstance(linear, AdaptedLinear):
        small = torch.addmm(x.new_empty(1), x, linear.lora_A.t(), beta=0, alpha=linear.scaling)
        added(hidden, small, linear.lora_B, out=hidden)
    return update


def _gated(x: Tensor, mlp: Any) -> Tensor:
    """silu(gate(x)) * up(x)."""
    linears = [mlp.gate_proj, mlp.up_proj]
    weight = _weight_of(x, linears)
    if weight is not None and mlp.gate_proj.bias is None and takes(x, weight, MOST_GATED_ROWS):
        return gated_product(x, weight)
    gate_up = _side_by_side(x, linears, weight)
    rows = gate_up.shape[0]
    size = gate_up.shape[1] // 2
    out = torch.empty(rows, size, dtype=gate_up.dtype, device=gate_up.device)
    _gate_kernel[(rows, triton.cdiv(size, 2048))](gate_up, out, N=size, BLOCK=2048, num_warps=4)
    return out


@triton.jit
def _add_norm_kernel(
    H, U, W, OUT, TOKEN, EMBEDDING, eps, stride_part, stride_out,
    N: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr, BEGINS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    inside = i < N
    w = tl.load(W + i, mask=inside, other=0.0).to(tl.float32)
    begin(EARLY, LETS_NEXT=True)
    if BEGINS:
        h = tl.load(EMBEDDING + tl.load(TOKEN + row).to(tl.int64) * N + i, mask=inside, other=0.0).to(tl.float32)
        tl.store(H + row * N + i, h, mask=inside)
    else:
        h = tl.load(H + row * N + i, mask=inside, other=0.0)
    if PARTS > 0:
        update = tl.load(U + row * N + i, mask=inside, other=0.0).to(tl.float32)
        for part in tl.static_range(1, PARTS):
            update += tl.load(U + part * stride_part + row * N + i, mask=inside, other=0.0)
        h += update
        tl.store(H + row * N + i, h, mask=inside)
    scale = tl.rsqrt(tl.sum(h * h, 0) / N + eps)
    tl.store(OUT + row * stride_out + i, (h * scale * w).to(OUT.dtype.element_ty), mask=inside)


@triton.jit
def _gate_kernel(GU, OUT, N: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < N
    gate = tl.load(GU + row * 2 * N + i, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(GU + row * 2 * N + N + i, mask=inside, other=0.0).to(tl.float32)
    tl.store(OUT + row * N + i, (gate * tl.sigmoid(gate) * up).to(OUT.dtype.element_ty), mask=inside)
