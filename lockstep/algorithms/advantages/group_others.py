"""Estimators beside grpo that judge a response by the other responses to its prompt. They need no critic.

With s_i the score of row i (the sum of its rewards), and mean_g, std_g (unbiased) and n_g over the rows of its group:

```text
grpo        (s_i - mean_g) / (std_g + 1e-6)
grpo_passk  (s_i - second best of g) / (std_g + 1e-6) for the one best row of g, else 0
rloo        s_i - the mean of the others        = n_g / (n_g - 1) (s_i - mean_g)
opo         s_i - the mean of g weighted by length
gpg         alpha (s_i - mean_g)
```

In all of them the advantage is the same for every token of a row, and `returns` is the score s_i. Special cases are the
same everywhere:

- *A group of one* has nothing to compare with. Its baseline is 0: the advantage is the score itself (times alpha in
  gpg). Only in grpo_passk it is 0: that advantage is a margin over the second best row, and there is none.
- *A group of equal scores* gets exactly 0.
- *Rows without a selected token* take no part in their group or in alpha.

All raise ValueError when `group` is not one number per row.
"""

import torch
from torch import Tensor

from lockstep.algorithms.advantages.group import STD_FLOOR
from lockstep.algorithms.advantages.scores import group_scores
from lockstep.algorithms.rows import Rows


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
