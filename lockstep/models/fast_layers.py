"""The same layers with fewer passes over memory: what lies between the matrix products of common families as kernels of its own on a GPU.

Llama, Mistral, Qwen2 and Qwen3 share one layer: norm, attention with rotary positions, norm, gated MLP. It is written out here once, over
the Hugging Face modules' own parameters. Other families, and these where something is unusual, keep transformers' code.

The residual stream is float32 from layer to layer, also where everything else is half precision, and results are rounded at the same
places as in generation (workers/rollout/native/gpu/fused.py): the log-probs of the two then differ less.
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
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer, Qwen2MLP, Qwen2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3MLP, Qwen3RMSNorm

from lockstep.models.attention import PACKED, packed_attention
from lockstep.models.flash import FLASH_TYPES

_LAYERS = (LlamaDecoderLayer, MistralDecoderLayer, Qwen2DecoderLayer, Qwen3DecoderLayer)
_MLPS = (LlamaMLP, MistralMLP, Qwen2MLP, Qwen3MLP)
_NORMS = (LlamaRMSNorm, MistralRMSNorm, Qwen2RMSNorm, Qwen3RMSNorm)
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
        elif type(part) in _LAYERS:
            part.forward = functools.partial(_layer, part, part.forward)
            found = True
    return found


def takes_float_residual(layer: nn.Module) -> bool:
    """Whether a layer is one whose input may be float32 where its weights are half precision."""
    return type(layer) in _LAYERS


def has_fast_layers(model: PreTrainedModel) -> bool:
    """Whether the model's layers are of a family that has them."""
    return any(type(part) in _LAYERS for part in model.modules())


def _layer(layer: Any, original: Callable[..., Tensor], hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    attention = layer.self_attn
    linears = [attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj]
    cos, sin = kwargs["position_embeddings"]
    size = attention.head_dim
    usual = (
        not args and cos.shape[-1] == size and size & (size - 1) == 0 and cos.stride() == sin.stride()
        and hidden_states.shape[0] == 1 and hidden_states.shape[-1] <= _LARGEST_NORM
        and kwargs.get("past_key_values") is None and attention.config._attn_implementation == PACKED
        and _plain(linears) and linears[3].bias is None and _is_gated(layer.mlp)
    )  # fmt: skip
    weight = layer.input_layernorm.weight
    if not (usual and _fits(weight)):
        return original(hidden_states.to(weight.dtype), *args, **kwargs)
    from lockstep.models.layer_kernels import AddProduct, Project, Rotate, SplitNormalise

    norm, second = layer.input_layernorm, layer.post_attention_layernorm
    h, x = SplitNormalise.apply(hidden_states.squeeze(0).float(), norm.weight, norm.variance_epsilon)
    projected = Project.apply(x, *(p for linear in linears[:3] for p in (linear.weight, linear.bias)))
    q, k, v = (y.view(1, len(x), -1, size) for y in projected)
    if isinstance(layer, Qwen3DecoderLayer):
        q, k = attention.q_norm(q), attention.k_norm(k)
    q, k = (Rotate.apply(y.transpose(1, 2), cos, sin) for y in (q, k))
    window = (
        attention.config.sliding_window if isinstance(layer, MistralDecoderLayer) else getattr(attention, "sliding_window", None)
    )
    out, _ = packed_attention(
        attention, q, k, v.transpose(1, 2), None, layout=kwargs["layout"], scaling=attention.scaling, sliding_window=window
    )
    h = AddProduct.apply(h, out.squeeze(0).flatten(1), linears[3].weight)
    h, x = SplitNormalise.apply(h, second.weight, second.variance_epsilon)
    return layer.mlp(x, residual=h)[None]


def _normalise(norm: Any, original: Callable[[Tensor], Tensor], hidden_states: Tensor) -> Tensor:
    if not _fits(norm.weight) or hidden_states.shape[-1] > _LARGEST_NORM:
        return original(hidden_states)
    from lockstep.models.layer_kernels import SplitNormalise

    return SplitNormalise.apply(hidden_states, norm.weight, norm.variance_epsilon)[1]


def _gated(mlp: Any, original: Callable[[Tensor], Tensor], x: Tensor, residual: Tensor | None = None) -> Tensor:
    linears = (mlp.gate_proj, mlp.up_proj, mlp.down_proj)
    if not (_plain(linears) and _fits(mlp.down_proj.weight) and all(linear.bias is None for linear in linears)):
        return original(x) if residual is None else residual + original(x)
    from lockstep.models.layer_kernels import GatedMLP

    return GatedMLP.apply(residual, x.flatten(0, -2), *(linear.weight for linear in linears)).view_as(x)


def _is_gated(mlp: Any) -> bool:
    return type(mlp) in _MLPS and mlp.config.hidden_act == "silu"


def _plain(linears: Any) -> bool:
    """Adapters, and weights that are divided among ranks, go through the modules."""
    return all(type(linear) is nn.Linear and not isinstance(linear.weight, DTensor) for linear in linears)


def _fits(weight: Tensor) -> bool:
    return weight.is_cuda and weight.dtype in FLASH_TYPES and not torch.compiler.is_compiling()
