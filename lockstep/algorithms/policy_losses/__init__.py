"""Policy losses: from log-probs and advantages to a loss per token.

A policy loss is a function whose keyword-only arguments say what it reads, from this vocabulary. Columns per token are flat, [M]:
the tokens of the B rows of a micro-batch end to end, without padding.

```text
old_log_prob     [M]     log-prob of each token under the policy before the update
log_prob         [M]     the same under the policy that learns; the gradient flows here
advantages       [M]
response_mask    [M]     1 where the policy wrote the token. What lies under its zeros may be NaN and must not reach the
                         gradient, so clean the inputs with `masking.zero_outside` first
rows             Rows    how the tokens divide into rows: their sums, means and places
clip_ratio_low, clip_ratio_high, clip_ratio_c, tau_pos, tau_neg      `actor_rollout_ref.actor.*`
clip_cov_ratio, clip_cov_lb, clip_cov_ub, kl_cov_ratio, ppo_kl_coef, dro_beta   `actor_rollout_ref.actor.policy_loss.*`
any other name   a key of `actor_rollout_ref.actor.policy_loss.loss_kwargs`, or a column that the loss's `prepare` wrote
```

It returns the loss per token [M], which `aggregation.agg_loss` turns into a number, and detached metrics per token, each
[M], which the caller averages over the mask. All are 0 outside the mask. Keeping both per token is what makes them
independent of how the rows are batched. Every loss here has the same three metrics, so that runs can be compared:

```text
pg_clipfrac        1 where the clip changed the loss (for cispo: the weight; for geo_mean: the log-ratio)
pg_clipfrac_lower  1 where the dual clip did (for dppo_tv, dppo_kl: where c bounds the weight); 0 where there is none
ppo_kl             old_log_prob - log_prob, within -20 and 20: the k1 estimate of KL(old || new)
```

What depends on other rows (a statistic of the mini-batch) has no place in the loss, which sees one micro-batch. It goes
into a `prepare`: a function with keyword-only arguments of the same vocabulary (without log_prob, with `row_keys` [B]
int64 for counted randomness), called once with the whole mini-batch before it is cut. It returns columns [M] by name.

A loss or `prepare` that is added and does not name `rows` is written for padded blocks: its columns and results are
[B, T], T the longest row (see `blocks`).

```text
clipped       PPO's: vanilla; the log-ratio, the clip and the metrics, which all share
per_token     each token has a weight of its own: cispo, gpg, sapo, dro
per_sequence  the tokens of a row share one ratio: gspo, geo_mean
divergence    a trust region of probabilities: dppo_tv, dppo_kl
covariance    tokens chosen by their covariance in the mini-batch: clip_cov, kl_cov
```

To add one:

```python
@register_policy_loss("mine")
def mine(*, old_log_prob, log_prob, advantages, response_mask, clip_ratio_high):
    ratio = zero_outside(log_prob - old_log_prob, response_mask).exp().clamp(max=1 + clip_ratio_high)
    return -zero_outside(advantages, response_mask) * ratio, {}
```
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from lockstep.algorithms.binding import Bound, PaddedCall
from lockstep.algorithms.policy_losses.clipped import vanilla
from lockstep.algorithms.policy_losses.covariance import choose_clip_cov, choose_kl_cov, clip_cov, kl_cov
from lockstep.algorithms.policy_losses.divergence import dppo_kl, dppo_tv
from lockstep.algorithms.policy_losses.per_sequence import geo_mean, gspo
from lockstep.algorithms.policy_losses.per_token import cispo, dro, gpg, sapo
from lockstep.algorithms.registry import LossTable, input_names
from lockstep.algorithms.rows import Rows

PolicyLoss = Callable[..., tuple[Tensor, dict[str, Tensor]]]
Prepare = Callable[..., dict[str, Tensor]]

POLICY_LOSSES: dict[str, PolicyLoss] = {
    "vanilla": vanilla,
    "gspo": gspo,
    "cispo": cispo,
    "gpg": gpg,
    "geo_mean": geo_mean,
    "sapo": sapo,
    "dro": dro,
    "dppo_tv": dppo_tv,
    "dppo_kl": dppo_kl,
    "clip_cov": clip_cov,
    "kl_cov": kl_cov,
}
"""Name -> loss: the values of `actor.policy_loss.loss_mode`."""

FLAT_WITHOUT_ADVANTAGE = frozenset({vanilla, gspo, cispo, gpg, geo_mean, sapo, dppo_tv, dppo_kl, clip_cov})
"""The losses whose gradient is 0 in a row whose advantages are: such a row can be left out of an update."""

PREPARATIONS: dict[PolicyLoss, Prepare] = {clip_cov: choose_clip_cov, kl_cov: choose_kl_cov}
"""Loss -> what it needs done once for a mini-batch."""

_BUILT_IN = frozenset(POLICY_LOSSES.values())
"""They are flat whether they name `rows` or not."""

REMEDY = "add it to actor_rollout_ref.actor.policy_loss.loss_kwargs, or give the argument a default"

BATCH_INPUTS = (
    *("old_log_prob", "log_prob", "advantages", "response_mask", "rows", "row_keys"),
    *("ref_log_prob", "rollout_is_weights"),
)
"""The inputs that come from the batch; the last two only in runs that have them."""


_TABLE = LossTable("policy loss", POLICY_LOSSES, PREPARATIONS, BATCH_INPUTS)
register_policy_loss = _TABLE.register
get_policy_loss = _TABLE.get
missing_numbers = _TABLE.missing_numbers
_what = _TABLE.what


def loss_inputs(loss: PolicyLoss) -> dict[str, bool]:
    """The names that the loss and its `prepare` read, and whether each is required. ConfigError when one is not keyword-only."""
    prepare = bind_prepare(loss, {})
    return (prepare.columns if prepare is not None else {}) | input_names(_what(loss), loss)


def check_numbers(loss: PolicyLoss, parameters: Mapping[str, Any]) -> None:
    """Raise the ConfigError that the loss, one of those here, would raise for these numbers in training: it is called on one token.

    One that was added is not called: what it expects of a batch is not known.
    """
    if loss not in _BUILT_IN:
        return
    columns = dict.fromkeys(("old_log_prob", "log_prob", "advantages", "response_mask"), torch.ones(1))
    rows = Rows(torch.ones(1, dtype=torch.int64))
    prepare = bind_prepare(loss, parameters)
    if prepare is not None:
        columns |= prepare(columns | {"row_keys": torch.zeros(1, dtype=torch.int64)}, rows)
    bind_policy_loss(loss, parameters)(columns, rows)


def takes_blocks(loss: PolicyLoss) -> bool:
    """Whether the loss is written for padded blocks: an added one that does not name `rows`."""
    return loss not in _BUILT_IN and "rows" not in input_names(_what(loss), loss)


def bind_policy_loss(loss: PolicyLoss, parameters: Mapping[str, Any]) -> Bound:
    """The loss with those of the `parameters` that it names: `bound(columns, rows)` gives loss [M] and metrics, [M] each.

    Raises ConfigError when an argument of the loss is not keyword-only.
    """
    return (PaddedCall if takes_blocks(loss) else Bound)(_what(loss), loss, parameters, REMEDY)


def bind_prepare(loss: PolicyLoss, parameters: Mapping[str, Any]) -> Bound | None:
    """The loss's `prepare`: `bound(columns, rows)` gives the columns [M] that it computes from a whole mini-batch. None if it has none."""
    prepare = PREPARATIONS.get(loss)
    if prepare is None:
        return None
    what = f"the prepare of {_what(loss)}"
    return (Bound if "rows" in input_names(what, prepare) else PaddedCall)(what, prepare, parameters, REMEDY)
