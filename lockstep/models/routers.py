"""The routers of mixtures of experts: the families that are known, the places of their routers, and the replay of given experts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lockstep.errors import ConfigError

FAMILIES = ("mixtral", "olmoe", "qwen2_moe", "qwen3_moe")
"""Families of transformers whose routers are known here. A router returns logits [N, experts], and the weights and the numbers of the
experts that it chose, both [N, k]."""
ON_GPU = ("mixtral", "qwen3_moe")
"""Families whose choices a sampler on a GPU keeps."""
NOT_RECORDED = -1
"""Stands for each expert of a token whose choice is not known."""
RouterOutput = tuple[Tensor, Tensor, Tensor]
_ROUTER = "TopKRouter"
"""The end of a router's class name."""


def routers(module: PreTrainedModel) -> list[nn.Module]:
    """Return the routers of a model of FAMILIES, layer by layer; an empty list for another family."""
    if module.config.model_type not in FAMILIES:
        return []
    return [part for part in module.modules() if type(part).__name__.endswith(_ROUTER)]


def check_replay(hf_config: Any, device_type: str) -> None:
    """Raise ConfigError unless the choices of this model's routers can be kept by a sampler on this kind of device."""
    key = "actor_rollout_ref.rollout.router_replay"
    family = hf_config.model_type
    if family not in FAMILIES:
        raise ConfigError(
            f"{key}=true is for mixtures of the families {', '.join(FAMILIES)}, and this model is a {family}; set it to false"
        )
    if device_type != "cpu" and family not in ON_GPU:
        raise ConfigError(
            f"{key}=true: the native engine keeps what routers of {family} chose on a CPU only, on a GPU those of {', '.join(ON_GPU)}, "
            f"and the device is {device_type}; set it to false"
        )


def replayed(router: nn.Module, output: RouterOutput, given: Tensor) -> RouterOutput:
    """Return the router's output as if it had chosen `given` [N, k]; tokens with NOT_RECORDED keep their own choice.

    The weights of the given experts come from the router's present logits, and the gradient goes through them.
    """
    logits, scores, chosen = output
    chosen = torch.where(given == NOT_RECORDED, chosen, given.to(chosen.dtype))
    weights = logits.float().softmax(-1).gather(-1, chosen)
    if getattr(router, "norm_topk_prob", True):  # Mixtral has no such option, and always does
        weights = weights / weights.sum(-1, keepdim=True)
    return logits, weights.to(scores.dtype), chosen


def num_changed(chosen: Tensor, given: Tensor) -> tuple[Tensor, Tensor]:
    """Return how many of the tokens with given experts would have gone to others, in any order; and the number of such tokens."""
    known = given[:, 0] != NOT_RECORDED
    differs = (chosen.sort(-1).values != given.to(chosen.dtype).sort(-1).values).any(-1)
    return (differs & known).sum(), known.sum()
