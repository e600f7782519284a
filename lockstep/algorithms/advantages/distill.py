"""Learn from a teacher: the reference is another model, and what it thinks of each token is all that counts."""

from torch import Tensor

from lockstep.algorithms.masking import zero_outside
from lockstep.algorithms.rows import Rows


def distill(*, old_log_probs: Tensor, ref_log_prob: Tensor, response_mask: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
    """On-policy distillation with sampled tokens (Lu et al., Thinking Machines, 2025; Gu et al., arXiv 2306.08543).

    ```text
    advantages  = returns = log p_teacher - log p_student      of each token that the student wrote
    ```

    Its mean over samples is minus the reverse KL at each place, so the policy gradient goes down that KL, one place at a time: what a
    token makes of the rest of the row is not counted (no discount, no sum). Reads no reward. A student that is its own teacher gets
    exactly 0.
    """
    assert len(old_log_probs) == rows.num_tokens
    advantages = zero_outside(ref_log_prob - old_log_probs, response_mask)
    return advantages, advantages
