"""The same layers with fewer passes over memory: what lies between the matrix products of common families as kernels of its own on a GPU.

Llama, Mistral, Qwen2 and Qwen3 share one layer: norm, attention with rotary positions, norm, gated MLP; in Mixtral and Qwen3-MoE the MLP
is a mixture of experts. It is written out here once, over the Hugging Face modules' own parameters. Other families, and these where
something is unusual, keep transformers' code; `compile_layers` makes that faster for any family.

The residual stream is float32 from layer to layer, also where everything else is half precision, and results are rounded at the same
places as in generation (generation/gpu/fused.py): the log-probs of the two then differ less.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaMLP, LlamaRMSNorm
from transformers.models.mistral.modeling_mistral import MistralDecoderLayer, MistralMLP, MistralRMSNorm
from transformers.models.mixtral.modeling_mixtral import MixtralDecoderLayer, MixtralRMSNorm, MixtralSparseMoeBlock
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer, Qwen2MLP, Qwen2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3MLP, Qwen3RMSNorm
from transformers.models.qwen3_moe.modeling_qwen3_moe import (
    Qwen3MoeDecoderLayer,
    Qwen3MoeMLP,
    Qwen3MoeRMSNorm,
    Qwen3MoeSparseMoeBlock,
)

from lockstep.kernels.flash import FLASH_TYPES
from lockstep.kernels.linear_parts import LinearParts, parts_of
from lockstep.models.attention import PACKED, packed_attention

_LAYERS = (
    LlamaDecoderLayer, MistralDecoderLayer, Qwen2DecoderLayer, Qwen3DecoderLayer, MixtralDecoderLayer, Qwen3MoeDecoderLayer
)  # fmt: skip
_MLPS = (LlamaMLP, MistralMLP, Qwen2MLP, Qwen3MLP, Qwen3MoeMLP)
_MIXTURES = (MixtralSparseMoeBlock, Qwen3MoeSparseMoeBlock)
_NORMS = (LlamaRMSNorm, MistralRMSNorm, Qwen2RMSNorm, Qwen3RMSNorm, MixtralRMSNorm, Qwen3MoeRMSNorm)
_LARGEST_NORM = 16_384
"""A row of a norm is one block of a kernel."""


def install_fast_layers(model: PreTrainedModel) -> bool:
    """Make the model's layers run as kernels where they are on a GPU in half precision; returns whether it has any that can.

    In place, over the same parameters, and without effect elsewhere.
    """
    found = False
    for part in model.modules():
        if type(part) in _NORMS:
            part.forward = functools.partial(_normalise, part, part.forward)
        elif _is_gated(part):
            part.forward = functools.partial(_gated, part, part.forward)
        elif is_mixture(part):
            part.forward = functools.partial(_mixed, part, part.forward)
        elif takes_float_residual(part):
            part.forward = functools.partial(_layer, part, part.forward)
            found = True
    return found


def takes_float_residual(layer: nn.Module) -> bool:
    """Return True if the layer's input may be float32 while its weights are half precision.

    A layer that is recomputed has a class of the same name over its own (recompute.py).
    """
    return any(type(layer).__name__ == known.__name__ and isinstance(layer, known) for known in _LAYERS)


def has_fast_layers(model: PreTrainedModel) -> bool:
    """Whether the model's layers are of a family that has them."""
    return any(takes_float_residual(part) for part in model.modules())


def compile_layers(model: PreTrainedModel, backend: str = "inductor") -> None:
    """Compile the forward pass of each layer of any family, in place. Micro-batches of any length and layers of one kind share the code.

    The layer's own `forward` is compiled, not the call around it: the hooks of sharding and recomputation stay outside.
    """
    names = set(model._no_split_modules or ())
    for layer in model.modules():
        if type(layer).__name__ in names:
            layer.forward = torch.compile(layer.forward, dynamic=True, backend=backend)


def _layer(layer: Any, original: Callable[..., Tensor], hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    attention = layer.self_attn
    linears = _parts(attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj)
    cos, sin = kwargs["position_embeddings"]
    size = attention.head_dim
    usual = (
        not args and cos.shape[-1] == size and size & (size - 1) == 0 and cos.stride() == sin.stride()
        and hidden_states.shape[0] == 1 and hidden_states.shape[-1] <= _LARGEST_NORM
        and kwargs.get("past_key_values") is None and attention.config._attn_implementation == PACKED
        and (_is_gated(layer.mlp) or is_mixture(layer.mlp))
    )  # fmt: skip
    weight = layer.input_layernorm.weight
    if not (usual and _fits(weight)) or linears is None or linears[3].bias is not None:
        return original(hidden_states.to(weight.dtype), *args, **kwargs)
    from lockstep.kernels.layers import AddProduct, Project, Rotate, SplitNormalise

    norm, second = layer.input_layernorm, layer.post_attention_layernorm
    h, x = SplitNormalise.apply(hidden_states.squeeze(0).float(), norm.weight, norm.variance_epsilon)
    projected = Project.apply(x, *_flat(linears[:3]))
    q, k, v = (y.view(1, len(x), -1, size) for y in projected)
    if getattr(attention, "q_norm", None) is not None:
        q, k = attention.q_norm(q), attention.k_norm(k)
    q, k = (Rotate.apply(y.transpose(1, 2), cos, sin) for y in (q, k))
    window = (
        attention.config.sliding_window
        if isinstance(layer, MistralDecoderLayer | MixtralDecoderLayer)
        else getattr(attention, "sliding_window", None)
    )
    out, _ = packed_attention(
        attention, q, k, v.transpose(1, 2), None, layout=kwargs["layout"], scaling=attention.scaling, sliding_window=window
    )
    h = AddProduct.apply(h, out.squeeze(0).flatten(1), linears[3].scaling, *linears[3].tensors)
    h, x = SplitNormalise.apply(h, second.weight, second.variance_epsilon)
    return layer.mlp(x, residual=h)[None]


def _normalise(norm: Any, original: Callable[[Tensor], Tensor], hidden_states: Tensor) -> Tensor:
    if not _fits(norm.weight) or hidden_states.shape[-1] > _LARGEST_NORM:
        return original(hidden_states)
    from lockstep.kernels.layers import SplitNormalise

    return SplitNormalise.apply(hidden_states, norm.weight, norm.variance_epsilon)[1]


def _gated(mlp: Any, original: Callable[[Tensor], Tensor], x: Tensor, residual: Tensor | None = None) -> Tensor:
    linears = _parts(mlp.gate_proj, mlp.up_proj, mlp.down_proj)
    if linears is None or not _fits(linears[0].weight) or any(linear.bias is not None for linear in linears):
        return original(x) if residual is None else residual + original(x)
    from lockstep.kernels.layers import GatedMLP

    return GatedMLP.apply(residual, x.flatten(0, -2), *_flat(linears)).view_as(x)


def _mixed(mlp: Any, original: Callable[[Tensor], Tensor], x: Tensor, residual: Tensor | None = None) -> Tensor:
    if not _fits(mlp.experts.down_proj) or isinstance(mlp.experts.down_proj, DTensor):
        return original(x) if residual is None else residual + original(x[None])[0]
    from lockstep.kernels.experts import Experts

    flat = x.flatten(0, -2)
    _, weights, chosen = mlp.gate(flat)
    return Experts.apply(residual, flat, chosen, weights, mlp.experts.gate_up_proj, mlp.experts.down_proj).view_as(x)


def is_mixture(mlp: Any) -> bool:
    """Whether a part of a model is a mixture of experts as it is computed here."""
    return type(mlp) in _MIXTURES and type(mlp.experts.act_fn).__name__.startswith("SiLU") and not getattr(mlp, "jitter_noise", 0)


def _is_gated(mlp: Any) -> bool:
    return type(mlp) in _MLPS and mlp.config.hidden_act == "silu"


def _parts(*linears: Any) -> list[LinearParts] | None:
    """The parts of all of them. Weights that are divided among ranks, and layers that are not plain, go through the modules."""
    found = [parts_of(linear) for linear in linears]
    return None if None in found else found  # type: ignore[return-value]


def _flat(layers: list[LinearParts]) -> tuple[Any, ...]:
    """Scalings and tensors, as the kernels take them."""
    return tuple(layer.scaling for layer in layers), *(tensor for layer in layers for tensor in layer.tensors)


def _fits(weight: Tensor) -> bool:
    return weight.is_cuda and weight.dtype in FLASH_TYPES and not torch.compiler.is_compiling()
