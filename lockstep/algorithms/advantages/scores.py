"""The score of a row, and the statistics of its group. A group is the rows of one prompt.

Two rules are kept here for every estimator that compares rows:

- *Fully masked rows take no part.* They are in no sum, no mean and no group size, and their own results are 0.
- *Equal scores give exactly 0.* Statistics are taken of the distance to the group's best score, in float64. The distances
  of equal scores are exactly 0, while their mean, rounded, can differ from each of them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lockstep.algorithms.masked import zero_outside
from lockstep.algorithms.rows import Rows


def group_scores(token_level_rewards: Tensor, response_mask: Tensor, rows: Rows, group: Tensor) -> GroupScores:
    """The statistics of the rows' summed rewards. Raises ValueError when `group` is not one number per row."""
    scores = rows.sum(zero_outside(token_level_rewards.double(), response_mask))
    return GroupScores(scores, response_mask, rows, group, token_level_rewards.dtype)


def group_index(group: Tensor, rows: int) -> Tensor:
    """The groups numbered from 0 [B]. Raises ValueError when `group` is not one number for each of `rows` rows."""
    if group.shape != (rows,):
        raise ValueError(f"group must have one number for each of {rows} rows, but its shape is {tuple(group.shape)}")
    return group.unique(return_inverse=True)[1]


class GroupScores:
    """The scores of a batch and what a group says about them; every attribute is float64 [B], one number per row.

    ```text
    scores    s_i, the sum of the row's rewards under the mask
    lengths   the row's number of selected tokens
    counted   1 where that number is not 0
    size      n_g, the counted rows in the row's group
    below     s_i - max_g, at most 0
    centred   s_i - mean_g
    ```

    Raises ValueError when `group` is not one number per row.
    """

    def __init__(self, scores: Tensor, response_mask: Tensor, rows: Rows, group: Tensor, dtype: torch.dtype) -> None:
        """`scores` [B] float64, and the dtype of the results of `over_tokens`."""
        self._mask, self._rows, self._dtype = response_mask, rows, dtype
        self._group_index = group_index(group, len(rows))
        self.scores = scores
        self.lengths = rows.sum(response_mask.bool()).double()
        self.counted = (self.lengths > 0).double()
        self.size = self.sum(torch.ones_like(self.scores))
        self.below = torch.where(self.counted > 0, self.scores - self.max(self.scores), 0)
        self.centred = self.below - self.sum(self.below) / self.size.clamp(min=1)

    def sum(self, x: Tensor) -> Tensor:
        """Sum of x [B] over the counted rows of each row's group, [B]."""
        return torch.zeros_like(x).index_add(0, self._group_index, x * self.counted)[self._group_index]

    def max(self, x: Tensor) -> Tensor:
        """Largest x [B] among the counted rows of each row's group, [B]; -inf where there is none."""
        lowest = torch.full_like(x, -torch.inf)
        candidates = torch.where(self.counted > 0, x, lowest)
        return lowest.scatter_reduce(0, self._group_index, candidates, "amax")[self._group_index]

    def std(self) -> Tensor:
        """Unbiased standard deviation of the scores in each row's group, [B]; 0 in a group of one."""
        return (self.sum(self.centred.square()) / (self.size - 1).clamp(min=1)).sqrt()

    def normalised(self, by_std: bool, epsilon: float) -> Tensor:
        """(s_i - mean_g) / (std_g + epsilon), or without the division, [B]; s_i itself in a group of one."""
        return self.score_if_alone(self.centred / (self.std() + epsilon) if by_std else self.centred)

    def score_if_alone(self, advantage: Tensor) -> Tensor:
        """`advantage` [B], but the score itself in a group of one: with nothing to compare with, the baseline is 0."""
        return torch.where(self.size < 2, self.scores, advantage)

    def over_tokens(self, x: Tensor) -> Tensor:
        """x [B] at every selected token of its row, 0 elsewhere: [M] in the dtype of the rewards."""
        return zero_outside(self._rows.spread(x.to(self._dtype)), self._mask)
