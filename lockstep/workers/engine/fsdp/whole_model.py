"""A model that one rank has whole: there is nothing to shard, only the type of the computation to keep apart from that of the weights.

FSDP2 does the same with hooks around every layer, which for a small model are a good part of what the host does in an update.
"""

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from transformers import PreTrainedModel

from lockstep.models.fast_layers import takes_float_residual
from lockstep.models.mixin import extend_class
from lockstep.models.scores import ScoreLayer


class _Copied(NamedTuple):
    """A parameter that passes compute with in another type."""

    own: nn.Parameter
    copy: nn.Parameter
    """Without memory where no pass needs it."""
    places: list[tuple[dict[str, nn.Parameter | None], str]]
    """Where modules have it: a tied one is in several."""


class WholeModel:
    """Comes before a model's own class; see `keep_whole`. The modules' parameters are the copies from a forward pass to `reshard`."""

    _copied: list[_Copied]
    _computes: bool

    def forward(self, *args: Any, **inputs: Any) -> Any:
        """The model's own forward, on copies of the parameters as they are now, or were at the first pass since `reshard`."""
        if not self._computes:
            with torch.no_grad():
                for _, copy, _ in self._copied:
                    copy.untyped_storage().resize_(copy.numel() * copy.element_size())
                torch._foreach_copy_([copied.copy for copied in self._copied], [copied.own for copied in self._copied])
            self._compute_with_copies(True)
        return super().forward(*args, **inputs)  # type: ignore[misc]

    def reshard(self) -> None:
        """Make the modules' parameters those that learn, and free the copies."""
        if self._computes:
            self._compute_with_copies(False)
            for _, copy, _ in self._copied:
                copy.untyped_storage().resize_(0)

    def _compute_with_copies(self, computes: bool) -> None:
        self._computes = computes
        for own, copy, places in self._copied:
            for parameters, name in places:
                parameters[name] = copy if computes else own


def keep_whole(model: PreTrainedModel, dtype: torch.dtype, layers: set[type[nn.Module]]) -> nn.Module:
    """Make a model compute in `dtype`, in place: a WholeModel, or what it was where its parameters are of that type. A score layer
    computes with the parameters themselves.

    A backward pass adds the gradients of copies to those of the parameters, in their type, as it finds them. `layers` are classes: what
    enters one is brought to `dtype`, unless it takes a float32 residual stream.
    """
    places: dict[nn.Parameter, list[tuple[dict[str, nn.Parameter | None], str]]] = {}
    for part in model.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None and parameter.dtype != dtype and not isinstance(part, ScoreLayer):
                places.setdefault(parameter, []).append((part._parameters, name))
    if not places:
        return model
    for part in model.modules():
        if type(part) in layers and not takes_float_residual(part):
            part.register_forward_pre_hook(partial(_cast_inputs, dtype), with_kwargs=True)
    extend_class(model, WholeModel)
    whole: Any = model
    whole._copied = [_Copied(own, _empty_copy(own, dtype), found) for own, found in places.items()]
    whole._computes = False
    return model


def _empty_copy(own: nn.Parameter, dtype: torch.dtype) -> nn.Parameter:
    copy = nn.Parameter(torch.empty_like(own, dtype=dtype), own.requires_grad)
    copy.untyped_storage().resize_(0)
    if own.requires_grad:
        copy.register_post_accumulate_grad_hook(partial(_add_gradient, own))
    return copy


def _add_gradient(own: nn.Parameter, copy: Tensor) -> None:
    gradient = copy.grad
    copy.grad = None
    assert gradient is not None
    if own.grad is None:
        own.grad = gradient.to(own.dtype)
    else:
        own.grad += gradient


def _cast_inputs(dtype: torch.dtype, module: nn.Module, args: Any, kwargs: Any) -> Any:
    def cast(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

    return tree_map(cast, (args, kwargs))
