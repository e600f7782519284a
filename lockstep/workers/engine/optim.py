"""What every engine does at an update: the learning rate as a function of the update's number (nothing to save, nothing to restore), the
check of the gradient, and torch's AdamW with the place of its state."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from lockstep.config.engine import OptimConfig
from lockstep.errors import NumericalError

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
    """The updates of one model: those that are done, and how the next is made."""

    config: OptimConfig | None
    """None of a frozen model, which has none."""
    total: int
    done: int = 0

    @property
    def max_norm(self) -> float:
        """The norm to which a gradient is clipped."""
        assert self.config is not None
        return self.config.clip_grad or math.inf

    def make(self, norm: float, step: Callable[[float], None], clear: Callable[[], None]) -> OptimResult:
        """`step(learning rate)`, then `clear` the gradients, whose norm before clipping is `norm`. Raises NumericalError, without a step,
        where it is not finite."""
        assert self.config is not None
        if not math.isfinite(norm):
            clear()
            raise NumericalError(f"the gradient norm is {norm} at update {self.done}; no weight was changed")
        lr = learning_rate(self.done, self.total, self.config)
        step(lr)
        clear()
        self.done += 1
        return OptimResult(grad_norm=norm, lr=lr)


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
    warmup, kind = config.lr_warmup_steps, config.lr_scheduler_type
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
