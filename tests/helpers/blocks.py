"""Flat functions on the blocks [B, T] that are easy to write by hand: the rows are cut out of the blocks, the results put back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lockstep.algorithms.advantages import bind_estimator
from lockstep.algorithms.rows import Rows

TOKENS = ("token_level_rewards", "response_mask", "values", "old_log_probs", "ref_log_prob", "sum_pi_squared", "rollout_is_weights")
"""The inputs of estimators with one number per token."""


class Cut:
    """Rows of a block that end with their last selected token; every second row has the rest of the block too."""

    def __init__(self, mask: Tensor) -> None:
        places = torch.nn.functional.pad(mask.bool() * torch.arange(1, mask.shape[1] + 1), (1, 0))
        self.shape = mask.shape
        self.rows = Rows(torch.where(torch.arange(len(mask)) % 2 == 0, places.amax(1), mask.shape[1]))

    def __call__(self, block: Tensor) -> Tensor:
        """The tokens [M] of a block."""
        return self.rows.unpad(block)

    def back(self, x: Tensor) -> Tensor:
        """x [M] as a block, 0 behind the rows."""
        block = x.new_zeros(self.shape)
        block[self.rows.index, self.rows.positions] = x
        return block


def estimate(estimator: str | Callable[..., Any], **inputs: Any) -> tuple[Tensor, Tensor]:
    """Advantages and returns [B, T] of an estimator, from blocks."""
    cut = Cut(inputs["response_mask"])
    flat = {name: cut(x) if name in TOKENS and x is not None else x for name, x in inputs.items()}
    advantages, returns = bind_estimator(estimator, {})(flat, cut.rows)
    return cut.back(advantages), cut.back(returns)
