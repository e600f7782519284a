"""Estimators that compare a response with the other responses to its prompt. They need no critic.

With s_i the score of row i (the sum of its rewards), and mean_g, std_g (unbiased) and n_g over the rows of its group:

```text
grpo        (s_i - mean_g) / (std_g + 1e-6)
grpo_passk  (s_i - second best of g) / (std_g + 1e-6) for the one best row of g, else 0
rloo        s_i - the mean of the others        = n_g / (n_g - 1) (s_i - mean_g)
opo         s_i - the mean of g weighted by length
gpg         alpha (s_i - mean_g)
```

The advantage is the same for every token of a row, and `returns` is the score s_i. All estimators share these special cases:

- *A group of one* has nothing to compare with. Its baseline is 0: the advantage is the score itself (times alpha in gpg). Only in
  grpo_passk it is 0, because that advantage is a margin over the second best row.
- *A group of equal scores* gets exactly 0. Statistics are taken of the distance to the group's best score, in float64: the distances of
  equal scores are exactly 0, while their rounded mean can differ from each of them.
- *Rows without a selected token* take no part: they are in no sum, no mean, no group size and not in alpha, and their own results are 0.

All raise ValueError when `group` is not one number per row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lockstep.algorithms.masking import zero_outside
from lockstep.algorithms.rows import Rows

STD_FLOOR = 1e-6


def grpo(
    *,
    token_level_rewards: Tensor,
    response_mask: Tensor,
    rows: Rows,
    group: Tensor,
    norm_adv_by_std_in_grpo: bool,
    epsilon: float = STD_FLOOR,
) -> tuple[Tensor, Tensor]:
    """Group-relative advantages (Shao et al., arXiv 2402.03300): a response against the other responses to its prompt.

    ```text
    advantages  = (s_i - mean_g) / (std_g + 1e-6)
    ```

    Without `norm_adv_by_std_in_grpo` nothing is divided (Dr. GRPO, Liu et al., arXiv 2503.20783).
    """
    groups = group_scores(token_level_rewards, response_mask, rows, group)
    return groups.over_tokens(groups.normalised(norm_adv_by_std_in_grpo, epsilon)), groups.over_tokens(groups.scores)


def grpo_passk(
    *,
    token_level_rewards: Tensor,
    response_mask: Tensor,
    rows: Rows,
    group: Tensor,
    norm_adv_by_std_in_grpo: bool,
    epsilon: float = STD_FLOOR,
) -> tuple[Tensor, Tensor]:
    """By how much the best of the group would drop without this row (Tang et al., arXiv 2503.19595).

    ```text
    advantages  = (s_i - second best of g) / (std_g + 1e-6)   for the best row, 0 for the others
    ```

    Without `norm_adv_by_std_in_grpo` nothing is divided. When several rows share the best score, no single one is
    missed and all get 0. With rewards of 0 and 1, only a group with exactly one success teaches anything.
    """
    groups = group_scores(token_level_rewards, response_mask, rows, group)
    is_best = (groups.below == 0) & (groups.counted > 0)
    second_below = groups.max(torch.where(is_best, -torch.inf, groups.below))
    has_margin = is_best & (groups.sum(is_best.double()) == 1) & (groups.size > 1)
    advantage = torch.where(has_margin, -second_below, 0)
    if norm_adv_by_std_in_grpo:
        advantage = advantage / (groups.std() + epsilon)
    # A score that is not finite equals no maximum: it must show, and not become a 0.
    advantage = torch.where(groups.below.isfinite(), advantage, torch.nan)
    return groups.over_tokens(advantage), groups.over_tokens(groups.scores)


def rloo(*, token_level_rewards: Tensor, response_mask: Tensor, rows: Rows, group: Tensor) -> tuple[Tensor, Tensor]:
    """REINFORCE with the mean of the *other* rows as baseline (Ahmadian et al., arXiv 2402.14740).

    ```text
    advantages  = s_i - mean of the others = n_g / (n_g - 1) (s_i - mean_g)
    ```

    The baseline does not depend on the row itself, so the gradient is unbiased.
    """
    groups = group_scores(token_level_rewards, response_mask, rows, group)
    advantage = groups.centred * groups.size / (groups.size - 1).clamp(min=1)
    return groups.over_tokens(groups.score_if_alone(advantage)), groups.over_tokens(groups.scores)


def opo(*, token_level_rewards: Tensor, response_mask: Tensor, rows: Rows, group: Tensor) -> tuple[Tensor, Tensor]:
    """The baseline of least variance when a gradient's squared norm grows with length (Hao et al., arXiv 2505.23585).

    ```text
    advantages  = s_i - sum_j(len_j s_j) / sum_j(len_j)    over rows j of the group, len = selected tokens
    ```
    """
    groups = group_scores(token_level_rewards, response_mask, rows, group)
    baseline = groups.sum(groups.lengths * groups.below) / groups.sum(groups.lengths).clamp(min=1)
    return groups.over_tokens(groups.score_if_alone(groups.below - baseline)), groups.over_tokens(groups.scores)


def gpg(*, token_level_rewards: Tensor, response_mask: Tensor, rows: Rows, group: Tensor) -> tuple[Tensor, Tensor]:
    """Group policy gradient (Chu et al., arXiv 2504.02546): centred scores, enlarged when many scores are zero.

    ```text
    alpha       = B / max(number of rows with s_i != 0, 1)     B = rows with a selected token
    advantages  = alpha (s_i - mean_g)
    ```

    alpha is a property of the whole batch, and zero is a special score: adding a constant to all scores changes it, and
    a KL penalty in the reward makes it 1.
    """
    groups = group_scores(token_level_rewards, response_mask, rows, group)
    alpha = groups.counted.sum() / groups.scores.count_nonzero().clamp(min=1)
    return groups.over_tokens(alpha * groups.score_if_alone(groups.centred)), groups.over_tokens(groups.scores)


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
        self._mask = response_mask
        self._rows = rows
        self._dtype = dtype
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
