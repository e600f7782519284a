"""Losses of responses alone, each with a label. What they take and return: see the package."""

import torch
from torch import Tensor


def kto(
    *,
    log_prob: Tensor,
    ref_log_prob: Tensor,
    is_chosen: Tensor,
    kl: Tensor,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """KTO (Ethayarajh et al., arXiv 2402.01306). With h = log_prob - ref_log_prob and z = `kl`, the distance to the reference:

    ```text
    chosen    w+ (1 - s(b (h - z)))
    rejected  w- (1 - s(b (z - h)))
    ```

    Weights balance labels that are not equally many: w+ n+ / (w- n-) between 1 and 3/2. 0.5 at the start. The rewards are b (h - z).
    """
    rewards = beta * (log_prob - ref_log_prob - kl)
    wanted = is_chosen.bool()
    weights = torch.where(wanted, desirable_weight, undesirable_weight)
    return weights * torch.sigmoid(torch.where(wanted, -rewards, rewards)), rewards


def mismatch_kl(*, mismatched_log_prob: Tensor, mismatched_ref_log_prob: Tensor) -> dict[str, Tensor]:
    """kto's z = max(0, mean h over mismatched pairs), the same for every row: an estimate of the KL to the reference that is biased
    upwards by responses to other prompts, and 0 at the start."""
    mean = (mismatched_log_prob - mismatched_ref_log_prob).mean().clamp(min=0)
    return {"kl": mean.expand(mismatched_log_prob.shape)}
