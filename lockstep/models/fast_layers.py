"""The same layers with fewer passes over memory: norms, rotary positions and gates of common families as kernels of their own on a GPU.

Llama, Mistral, Qwen2 and Qwen3 share them. Other families keep transformers' code. transformers' layers call their rotary embedding by the
name of a function in their module, `apply_rotary_pos_emb(q, k, cos, sin)`, and offer no way to choose another: the name is bound anew, to
a function that computes the same.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.models.llama import modeling_llama
from transformers.models.mistral import modeling_mistral
from transformers.models.qwen2 import modeling_qwen2
from transformers.models.qwen3 import modeling_qwen3

_TYPES = (torch.bfloat16, torch.float16)
_NORMS = (modeling_llama.LlamaRMSNorm, modeling_mistral.MistralRMSNorm, modeling_qwen2.Qwen2RMSNorm, modeling_qwen3.Qwen3RMSNorm)
_MLPS = (modeling_llama.LlamaMLP, modeling_mistral.MistralMLP, modeling_qwen2.Qwen2MLP, modeling_qwen3.Qwen3MLP)
_MODULES: tuple[Any, ...] = tuple(sys.modules[norm.__module__] for norm in _NORMS)
_LARGEST_NORM = 16_384
"""A row of a norm is one block of a kernel."""


def has_fast_layers(model: PreTrainedModel) -> bool:
    """Whether the model's layers are of a family that has them."""
    return any(type(part) in _MLPS for part in model.modules())


def install_fast_layers(model: PreTrainedModel) -> bool:
    """Make the parts of the model's layers run as kernels where they are on a GPU in half precision; returns whether any does.

    In place, over the same parameters, and without effect elsewhere.
    """
    parts: list[Any] = [part for part in model.modules() if type(part) in _NORMS + _MLPS]
    for part in parts:
        if type(part) in _MLPS and part.config.hidden_act != "silu":
            continue
        part.forward = functools.partial(_normalise if type(part) in _NORMS else _gated, part, part.forward)
    for module in _MODULES:
        if any(type(part).__module__ == module.__name__ for part in parts) and not hasattr(module.apply_rotary_pos_emb, "replaces"):
            module.apply_rotary_pos_emb = _rotary(module.apply_rotary_pos_emb)
    return bool(parts)


def _normalise(norm: Any, original: Callable[[Tensor], Tensor], hidden_states: Tensor) -> Tensor:
    if not _fits(hidden_states) or hidden_states.shape[-1] > _LARGEST_NORM:
        return original(hidden_states)
    from lockstep.models.layer_kernels import Normalise

    return Normalise.apply(hidden_states, norm.weight, norm.variance_epsilon)


def _gated(mlp: Any, original: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    linears = (mlp.gate_proj, mlp.up_proj, mlp.down_proj)
    # Adapters and weights that are divided among ranks go through the modules.
    plain = all(type(linear) is nn.Linear and linear.bias is None and not isinstance(linear.weight, DTensor) for linear in linears)
    if not (_fits(x) and plain):
        return original(x)
    from lockstep.models.layer_kernels import GatedMLP

    return GatedMLP.apply(x.flatten(0, -2), *(linear.weight for linear in linears)).view_as(x)


def _rotary(original: Callable[..., Any]) -> Callable[..., Any]:
    def apply_rotary_pos_emb(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any) -> Any:
        size = q.shape[-1]
        usual = (
            not args and not kwargs and q.shape[0] == cos.shape[0] == 1 and cos.shape[-1] == size and cos.stride() == sin.stride()
        )
        if not (_fits(q) and usual and size & (size - 1) == 0):
            return original(q, k, cos, sin, *args, **kwargs)
        from lockstep.models.layer_kernels import Rotate

        return Rotate.apply(q, cos, sin), Rotate.apply(k, cos, sin)

    apply_rotary_pos_emb.replaces = original  # type: ignore[attr-defined]
    return apply_rotary_pos_emb


def _fits(x: Tensor) -> bool:
    return x.is_cuda and x.dtype in _TYPES and not torch.compiler.is_compiling()
