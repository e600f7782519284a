"""What torch's AdamW remembers of named parameters, for checkpoints. Reading it changes nothing: a parameter that had no update yet has no
state, which counts as zeros."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from lockstep.workers.engine.sharded import ReadRows, read_shards

Named = Mapping[str, nn.Parameter]
"""Hugging Face name -> parameter that learns."""


def moment_of(optimizer: torch.optim.Optimizer, parameter: nn.Parameter, kind: str) -> Tensor:
    """What this rank has of a moment."""
    state = optimizer.state.get(parameter)
    return state[kind] if state else torch.zeros_like(parameter)


def read_moments(optimizer: torch.optim.Optimizer, parameters: Named, kind: str, read: ReadRows) -> None:
    """Replace a moment of parameters that are DTensors."""
    moments = {name: torch.zeros_like(parameter, requires_grad=False) for name, parameter in parameters.items()}
    read_shards(moments.items(), read)
    for name, parameter in parameters.items():
        optimizer.state[parameter][kind] = moments[name]


def steps_of(optimizer: torch.optim.Optimizer, parameters: Named) -> dict[str, int]:
    """The updates of each parameter."""
    return {name: int(optimizer.state[p]["step"]) if p in optimizer.state else 0 for name, p in parameters.items()}


def set_steps(optimizer: torch.optim.Optimizer, parameters: Named, steps: Mapping[str, int]) -> None:
    """Replace the updates of each parameter, where fused AdamW keeps them."""
    for name, parameter in parameters.items():
        step = torch.tensor(float(steps[name]), dtype=torch.float32, device=parameter.device)
        optimizer.state[parameter]["step"] = step
