"""GRPO: a response against the other responses to its prompt. Its special cases are those of `group_others`."""

from torch import Tensor

from lockstep.algorithms.advantages.scores import group_scores
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
