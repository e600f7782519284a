"""What every engine does at an update: the learning rate, the check of the gradient, and torch's AdamW with the place of its state.

The learning rate is a function of the update's number, so there is nothing to save or restore.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from lockstep.config.engine import OptimConfig
from lockstep.workers.engine.dtensor import ReadRows, read_shards

if TYPE_CHECKING:
    pass


@dataclass(frozen=True)
class OptimResult:
    """What one optimizer step did."""

    grad_norm: float
    """Norm of the whole gradient before clipping."""
    lr: float
    """The learning rate it used."""


@dataclass(slots=True)
class Updates:
    """The updates of one model: how many are done, and the numbers of the next."""

    config: OptimConfig | None
    """None for a frozen model."""
    total: int
    done: int = 0

    @property
    def max_norm(self) -> float:
        """The norm to which the gradient is clipped."""
        assert self.config is not None, "a frozen engine cannot learn"
        return self.config.clip_grad or math.inf

    @property
    def next_learning_rate(self) -> float:
        """The learning rate of the next update."""
        assert self.config is not None, "a frozen engine cannot learn"
        return learning_rate(self.done, self.total, self.config)


def make_adamw(parameters: Iterable[nn.Parameter], config: OptimConfig) -> torch.optim.AdamW:
    """AdamW, fused. Parameters of one device mesh are a group: torch does not mix them."""
    groups: dict[DeviceMesh | None, list[nn.Parameter]] = {}
    for parameter in parameters:
        groups.setdefault(parameter.device_mesh if isinstance(parameter, DTensor) else None, []).append(parameter)
    return torch.optim.AdamW(
        [{"params": group} for group in groups.values()],
        lr=config.lr,
        betas=(config.betas[0], config.betas[1]),
        weight_decay=config.weight_decay,
        fused=True,
    )


def step_adamw(optimizer: torch.optim.AdamW, lr: float) -> None:
    """One step with this learning rate."""
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()


def learning_rate(update: int, total_updates: int, config: OptimConfig) -> float:
    """The learning rate of optimizer step `update` (from 0) out of `total_updates`.

    Linear warm-up over w steps: lr * (update + 1) / w. Then constant, or a fall from lr to lr * min_lr_ratio at the last step: as a cosine,
    linearly, or (wsd) linearly over the last lr_decay_steps_ratio of all steps.
    """
    warmup = config.lr_warmup_steps
    kind = config.lr_scheduler_type
    if warmup < 0:
        warmup = int(config.lr_warmup_steps_ratio * total_updates)
    if update < warmup:
        return config.lr * (update + 1) / warmup
    if kind == "constant":
        return config.lr
    start = max(warmup, total_updates - 1 - int(config.lr_decay_steps_ratio * total_updates)) if kind == "wsd" else warmup
    progress = min(1.0, max(0, update - start) / max(1, total_updates - 1 - start))
    left = 0.5 * (1.0 + math.cos(math.pi * progress)) if kind == "cosine" else 1.0 - progress
    return config.lr * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * left)


Named = Mapping[str, nn.Parameter]
"""Hugging Face name -> parameter that learns."""


def moment_of(optimizer: torch.optim.Optimizer, parameter: nn.Parameter, kind: str) -> Tensor:
    """What this rank has of a moment."""
    state = optimizer.state.get(parameter)
    return state[kind] if state else torch.zeros_like(parameter)


def read_sharded_moments(optimizer: torch.optim.Optimizer, parameters: Named, kind: str, read: ReadRows) -> None:
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
