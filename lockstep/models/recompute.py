"""What of the activations is kept for the backward pass, and what is computed again.

```text
none       everything is kept: fastest
selective  the MLP of each layer, which holds the widest tensors, is computed again
full       only what enters each layer is kept: least memory, about a third more time
```
"""

from functools import partial
from typing import Any

import psutil
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from lockstep.errors import ConfigError
from lockstep.models.flops import mlp_width
from lockstep.models.mixin import extend_class
from lockstep.utils.device import free_device_memory

KINDS = ("none", "selective", "full")
_SHARE = 0.6
"""Of the memory that is free when an engine starts, what activations may take: other models may still come."""
_TRAINED = 16
"""Bytes per parameter: float32 weight, gradient and two moments."""


def activation_bytes(kind: str, tokens: int, layers: int, hidden: int, intermediate: int, element: int, fast: bool = False) -> int:
    """Bytes kept for the backward pass of `tokens` tokens, with `element` bytes per number.

    Numbers per token and layer: 16 hidden + 3 intermediate when everything is kept (inputs of norms, projections, rotary embedding and
    attention; gate, up and their product); 10 hidden without the MLP; 1 hidden, and one whole layer, with full recomputation. `fast`
    layers (models/fast_layers.py) keep 10 hidden + 2 intermediate, 9 hidden without the MLP, and 2 hidden of a layer's input: their
    residual stream is float32; 4 hidden once are its gradient before and after a layer.
    """
    whole = 10 * hidden + 2 * intermediate if fast else 16 * hidden + 3 * intermediate
    without_mlp, before, gradient = (9 * hidden, 2 * hidden, 4 * hidden) if fast else (10 * hidden, hidden, 0)
    per_token = {"none": layers * whole, "selective": layers * without_mlp + whole, "full": layers * before + whole}[kind]
    return tokens * (per_token + gradient) * element


def choose_recompute(
    model: PreTrainedModel, tokens: int | None, free: int, world_size: int, element: int, fast: bool = False
) -> str:
    """The least recomputation with which micro-batches of `tokens` tokens fit; full where their size is not known.

    `free` bytes hold the model's state (sharded over `world_size` ranks) and its activations, which may take 0.6 of what is left.
    """
    if tokens is None:
        return "full"
    config = model.config.get_text_config()
    hidden = config.hidden_size
    intermediate = mlp_width(config)
    # What does not learn, beside adapters, is in the type of the computation: kept, and gathered for it.
    state = sum(p.numel() * (_TRAINED if p.requires_grad else 2 * element) for p in model.parameters()) // world_size
    room = _SHARE * (free - state)
    fitting = (
        kind
        for kind in possible_kinds(model)
        if activation_bytes(kind, tokens, config.num_hidden_layers, hidden, intermediate, element, fast) <= room
    )
    return next(fitting, "full")


def possible_kinds(model: PreTrainedModel) -> list[str]:
    """The kinds that the model can do, from the least recomputation to the most."""
    return [kind for kind in KINDS if kind != "selective" or _mlps(model)]


def apply_recompute(model: PreTrainedModel, kind: str) -> None:
    """Make the model's forward pass keep no more than `kind` says. Raises ConfigError where the model cannot."""
    remedy = "set model.enable_gradient_checkpointing=false"
    if kind == "full":
        layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
        if not model.supports_gradient_checkpointing or not layers:
            raise ConfigError(f"{type(model).__name__} has no gradient checkpointing; {remedy}")
        for layer in layers:
            extend_class(layer, _RecomputedLayer)
    elif kind == "selective":
        mlps = _mlps(model)
        if not mlps:
            raise ConfigError(f"{type(model).__name__} has no layers with a part named mlp; set model.recompute=full, or {remedy}")
        for mlp in mlps:
            _recompute(mlp)


def free_memory(device: torch.device) -> int:
    """Bytes that are free on the device (on a CPU: in the machine)."""
    free = free_device_memory(device)
    return psutil.virtual_memory().available if free is None else free


def _mlps(model: PreTrainedModel) -> list[nn.Module]:
    return [module for name, module in model.named_modules() if name.endswith(".mlp")]


class _RecomputedLayer:
    """Comes before the class of a layer. transformers' own recomputation works in training mode only, and models train in evaluation
    mode (load.py)."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = partial(super().__call__, **kwargs)  # type: ignore[misc]
        if not torch.is_grad_enabled():
            return call(*args)
        return checkpoint(call, *args, use_reentrant=False)


def _recompute(module: nn.Module) -> None:
    forward = module.forward

    def recomputed(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    module.forward = recomputed
