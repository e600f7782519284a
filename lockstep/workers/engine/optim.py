"""The learning rate as a function of the update's number (nothing to save, nothing to restore), and where an optimizer's state lies."""

import math

import torch
from torch import Tensor

from lockstep.config.engine import OptimConfig


def learning_rate(update: int, total_updates: int, config: OptimConfig) -> float:
    """The learning rate of optimizer step `update` (from 0) out of `total_updates`.

    Linear warm-up over w steps: lr * (update + 1) / w. Then constant, or a cosine from lr down to lr * min_lr_ratio at the last step.
    """
    warmup = config.lr_warmup_steps
    if warmup < 0:
        warmup = int(config.lr_warmup_steps_ratio * total_updates)
    if update < warmup:
        return config.lr * (update + 1) / warmup
    if config.lr_scheduler_type == "constant":
        return config.lr
    progress = min(1.0, (update - warmup) / max(1, total_updates - 1 - warmup))
    cosine = 0.5 * (1.0 + math.cos(math.pi * progress))
    return config.lr * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * cosine)


def move_state(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Move what the optimizer remembers of each parameter to a device. The count of steps stays where it is."""
    for remembered in optimizer.state.values():
        for name, value in remembered.items():
            if isinstance(value, Tensor) and name != "step":
                remembered[name] = value.to(device)
