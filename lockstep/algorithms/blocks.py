"""Estimators and policy losses on padded blocks [B, T], for code that has its batches so: B rows of T tokens, some outside the mask.

The trainer has flat columns and needs none of this; `binding.py` is the other way round.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lockstep.algorithms.advantages import AdvantageEstimator, bind_estimator
from lockstep.algorithms.binding import PER_ROW
from lockstep.algorithms.masking import masked_mean
from lockstep.algorithms.policy_losses import bind_policy_loss, bind_prepare, clip_cov, get_policy_loss
from lockstep.algorithms.rows import Rows

BLOCKS = ("old_log_prob", "log_prob", "advantages", "response_mask")
"""What a policy loss reads of a batch, in verl's order."""


def estimate(estimator: AdvantageEstimator, inputs: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Advantages and returns as blocks. `inputs` has blocks by name, numbers (also as tensors of one), and `index`, the prompt of each
    row as an array or tensor of any kind, from which `group` follows."""
    mask = inputs["response_mask"]
    available = {name: x.item() if isinstance(x, Tensor) and x.dim() == 0 else x for name, x in inputs.items()}
    if "index" in inputs:
        ids = inputs["index"].tolist() if hasattr(inputs["index"], "tolist") else inputs["index"]
        numbers: dict[str, int] = {}
        group = [numbers.setdefault(str(name), len(numbers)) for name in ids]
        available["group"] = torch.tensor(group, dtype=torch.int64, device=mask.device)
    flat = {name: x.flatten() if isinstance(x, Tensor) and name not in PER_ROW else x for name, x in available.items()}
    advantages, returns = bind_estimator(estimator, {})(flat, Rows.of_padded(mask))
    return advantages.view(mask.shape), returns.view(mask.shape)


def policy_loss(name: str, numbers: Mapping[str, Any], blocks: tuple[Tensor, ...]) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss per token, a block, and the means of its metrics. The blocks are old_log_prob, log_prob, advantages and the mask.

    clip_cov and kl_cov choose their tokens from the current log-probs, as there is no mini-batch before the update here, and never one
    that the clip already holds.
    """
    rows = Rows.of_padded(blocks[-1])
    loss_fn = get_policy_loss(name)
    columns = {key: block.flatten() for key, block in zip(BLOCKS, blocks, strict=True)}
    prepare = bind_prepare(loss_fn, numbers)
    if prepare is not None and name in ("clip_cov", "kl_cov"):
        none = {"cov_selected": torch.zeros_like(columns["advantages"])}
        clipped = bind_policy_loss(clip_cov, numbers)(columns | none, rows)[1]["pg_clipfrac"]
        current = {"old_log_prob": columns["log_prob"].detach(), "eligible": clipped == 0}
        row_keys = torch.arange(len(rows), device=clipped.device)
        columns |= prepare({**columns, **current, "row_keys": row_keys}, rows)
    loss, metrics = bind_policy_loss(loss_fn, numbers)(columns, rows)
    means = {key: masked_mean(values, columns["response_mask"]) for key, values in metrics.items()}
    return loss.view(blocks[-1].shape), means
