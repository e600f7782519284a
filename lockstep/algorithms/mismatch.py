"""When the policy that sampled is not the policy that learns: importance weights, rejection, and how far apart they are.

Three policies are told apart:

```text
behaviour   drew the tokens                              rollout_log_prob
proximal    the weights before the update                old_log_prob
current     the weights during the update                log_prob, in the policy loss
```

The policy loss compares current with proximal. What is here corrects for the step from behaviour to proximal, of which
the log-ratio per token is x = old_log_prob - rollout_log_prob: decoupled PPO. Where both are the same numbers x is 0,
every weight is 1 and nothing is rejected.

Weights multiply the loss of a token and stay in the denominators. Rejection takes tokens out of the mask, hence out of
the denominators, the estimators' sums and the groups' statistics alike.

Columns per token are flat, [M], and `rows` says how they divide into rows.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.algorithms.masking import masked_mean, zero_outside
from lockstep.algorithms.registry import unknown_name
from lockstep.algorithms.rows import Rows
from lockstep.errors import ConfigError

IS_LEVELS = ("token", "sequence")
RS_KINDS = (
    "token_k1", "token_k2", "token_k3",
    "seq_sum_k1", "seq_sum_k2", "seq_sum_k3", "seq_mean_k1", "seq_mean_k2", "seq_mean_k3", "seq_max_k2", "seq_max_k3",
    "group_k1", "group_k2", "group_k3",
)  # fmt: skip

_MAX_LOG_RATIO = 20.0
"""exp(20) is about 5e8: beyond any threshold, and its square is still finite in float32."""
_SECTION = "algorithm.rollout_correction"


@dataclass(frozen=True)
class Bounds:
    """An interval [low, high]; `low` is 0 where only the upper end was given."""

    low: float
    high: float


@dataclass(frozen=True)
class Correction:
    """What `algorithm.rollout_correction` asks for."""

    level: str | None
    """Of the weights: token, sequence, or None for no weights."""
    band: Bounds
    """Weights above `high` are cut to it when `low` is 0 (truncation); else weights outside become 0 (IcePop)."""
    normalise: bool
    """Divide the weights by their mean."""
    rejections: tuple[tuple[str, Bounds], ...]
    """Kinds of rejection with what is kept; a token must pass all of them."""

    @property
    def is_on(self) -> bool:
        """Whether there is anything to do."""
        return self.level is not None or bool(self.rejections)


def make_correction(
    rollout_is: str | None,
    rollout_is_threshold: float | str,
    rollout_is_batch_normalize: bool,
    rollout_rs: str | None,
    rollout_rs_threshold: float | str | None,
) -> Correction:
    """Read the options.

    Args:
        rollout_is: token, sequence or None.
        rollout_is_threshold: a number of at least 1 cuts the weights there; "low_high" zeroes those outside.
        rollout_rs: kinds of rejection (`RS_KINDS`), separated by commas, or None.
        rollout_rs_threshold: one threshold for each kind, separated by commas, or one for all. For k1 "low_high", bounds
            of the ratio, or one number of at least 1, whose reciprocal is the lower bound; for k2 and k3 an upper bound.

    Raises ConfigError when a name is unknown or a threshold is missing or cannot work.
    """
    if rollout_is is not None and rollout_is not in IS_LEVELS:
        raise unknown_name(f"{_SECTION}.rollout_is", rollout_is, IS_LEVELS)
    band = _bounds(f"{_SECTION}.rollout_is_threshold", str(rollout_is_threshold))
    if band.low == 0 and band.high < 1:
        raise ConfigError(
            f"{_SECTION}.rollout_is_threshold={rollout_is_threshold} cuts weights below 1, where no correction is needed; set at "
            "least 1, or write both ends of a band with a decimal point: 0.5_5.0"
        )
    rejections = () if rollout_rs is None else _rejections(str(rollout_rs), rollout_rs_threshold)
    return Correction(rollout_is, band, rollout_is_batch_normalize, rejections)


def correct(
    correction: Correction, old_log_prob: Tensor, rollout_log_prob: Tensor, response_mask: Tensor, rows: Rows, group: Tensor
) -> tuple[Tensor | None, Tensor, dict[str, float]]:
    """What a correction makes of a batch: the weights [M] of its tokens (None without), the mask [M] of those that no rejection took, and
    metrics of all of it."""
    mask = response_mask
    metrics = mismatch_metrics(old_log_prob, rollout_log_prob, mask, rows)
    x = log_ratio(old_log_prob, rollout_log_prob, mask)
    weights = None
    if correction.level is not None:
        raw = raw_weights(x, mask, rows, correction.level)
        metrics |= weight_metrics(raw, mask, rows, correction.level, correction.band, correction.normalise)
        weights = importance_weights(x, mask, rows, correction.level, correction.band, correction.normalise)
    kept = mask
    for kind, bounds in correction.rejections:
        passed = kept_tokens(x, mask, rows, kind, bounds, group)
        metrics |= rejection_metrics(rejection_statistic(x, mask, rows, kind, group), mask, rows, kind, bounds)
        metrics |= _lost(f"rollout_rs_{kind}", mask, passed, rows)
        kept = kept & passed
    if correction.rejections:
        metrics |= _lost("rollout_rs", mask, kept, rows)
    return weights, kept, metrics


def _lost(name: str, before: Tensor, after: Tensor, rows: Rows) -> dict[str, float]:
    """The share of tokens that left the mask, and of rows that lost at least one."""
    lost = before & ~after
    touched, counted = (int((rows.sum(tokens) > 0).sum()) for tokens in (lost, before))
    return {
        f"{name}_masked_fraction": int(lost.sum()) / max(int(before.sum()), 1),
        f"{name}_seq_masked_fraction": touched / max(counted, 1),
    }


def log_ratio(old_log_prob: Tensor, rollout_log_prob: Tensor, response_mask: Tensor) -> Tensor:
    """x = old_log_prob - rollout_log_prob [M], 0 outside the mask."""
    return zero_outside(old_log_prob - rollout_log_prob, response_mask)


def raw_weights(x: Tensor, response_mask: Tensor, rows: Rows, level: str) -> Tensor:
    """exp(x) of each token, or of its whole row, with the exponent within -20 and 20: [M], 0 outside the mask."""
    exponent = x if level == "token" else rows.spread(rows.sum(zero_outside(x, response_mask)))
    return zero_outside(_within(exponent).exp(), response_mask)


def importance_weights(x: Tensor, response_mask: Tensor, rows: Rows, level: str, band: Bounds, normalise: bool = False) -> Tensor:
    """The weights of the loss [M], without gradient, 0 outside the mask.

    ```text
    w = min(exp(x), high)                          truncated (Yao et al. 2025), where `band.low` is 0
    w = exp(x) where low <= exp(x) <= high, else 0 IcePop (Ling team, arXiv 2510.18855)
    ```

    With x of the token (level "token") or the sum of x over the row ("sequence"). `normalise` divides by the mean, over
    tokens or over rows.
    """
    weights = _cut(raw_weights(x.detach(), response_mask, rows, level), band)
    if normalise:
        mean = _one_each(weights, response_mask, rows, level).mean().to(weights.dtype)
        weights = weights / torch.where(mean > 0, mean, 1)  # without a weight the mean is NaN
    return weights


def kept_tokens(x: Tensor, response_mask: Tensor, rows: Rows, kind: str, bounds: Bounds, group: Tensor | None = None) -> Tensor:
    """Which tokens of the mask pass one kind of rejection: bool [M].

    Per token k1 is x, k2 is x^2 / 2 and k3 is exp(x) - 1 - x. The statistic is that of the token (token_*), the row's sum,
    mean or largest (seq_sum_*, seq_mean_*, seq_max_*), or the mean over the group's rows of their means (group_*); a row or
    group that fails loses all its tokens. For k1 the *ratio* exp(statistic) must be within the bounds, for k2 and k3 the
    statistic itself must not be above the upper one.

    Raises ConfigError when the kind is unknown or a group_* kind has no `group` [B].
    """
    statistic = rejection_statistic(x, response_mask, rows, kind, group)
    if kind.endswith("k1"):
        lowest = math.log(bounds.low) if bounds.low else -math.inf
        passes = (statistic >= lowest) & (statistic <= math.log(bounds.high))
    else:
        passes = statistic <= bounds.high
    return response_mask.bool() & passes


def rejection_statistic(x: Tensor, response_mask: Tensor, rows: Rows, kind: str, group: Tensor | None = None) -> Tensor:
    """What one kind of rejection looks at, for each token [M]; see `kept_tokens`."""
    if kind not in RS_KINDS:
        raise unknown_name("kind of rejection", kind, RS_KINDS)
    place, divergence = kind.rsplit("_", 1)
    clamped = _within(x)
    value = {"k1": x, "k2": 0.5 * x.square(), "k3": torch.expm1(clamped) - clamped}[divergence]
    match place:
        case "token":
            return value
        case "seq_sum":
            return rows.spread(rows.sum(zero_outside(value, response_mask)))
        case "seq_mean":
            return rows.spread(rows.mean(value, response_mask))
        case "seq_max":  # k2 and k3 are at least 0
            largest = value.new_zeros(len(rows)).scatter_reduce(0, rows.index, zero_outside(value, response_mask), "amax")
            return rows.spread(largest)
        case _:
            counted = rows.sum(response_mask.bool()) > 0
            return rows.spread(_group_mean(rows.mean(value, response_mask), counted, group))


def mismatch_metrics(old_log_prob: Tensor, rollout_log_prob: Tensor, response_mask: Tensor, rows: Rows) -> dict[str, float]:
    """How far the proximal policy is from the behaviour policy.

    ```text
    kl, k3_kl                       token means of -x and of exp(x) - 1 - x: both estimate KL(behaviour || proximal)
    training_ppl, rollout_ppl       row means of exp(-mean log-prob) under the proximal and the behaviour policy
    training_log_ppl, rollout_log_ppl, log_ppl_diff, log_ppl_abs_diff, log_ppl_diff_max, log_ppl_diff_min, ppl_ratio
                                    row means of the logarithm, and of proximal minus behaviour; ppl_ratio is exp of it
    chi2_token, chi2_seq            mean squared ratio of tokens, of rows, less 1
    ```

    Empty when no token is selected. Numbers that overflow are inf: they say what happened; the ratios in chi2_* stay within exp(-20) and
    exp(20).
    """
    mask = response_mask.bool()
    counted = rows.sum(mask) > 0
    if not counted.any():
        return {}
    old, rollout = (zero_outside(p.double(), mask) for p in (old_log_prob, rollout_log_prob))
    x = old - rollout
    training, sampler = (-rows.mean(p, mask)[counted] for p in (old, rollout))
    difference = training - sampler
    found = {
        "kl": masked_mean(-x, mask),
        "k3_kl": masked_mean(torch.expm1(x) - x, mask),
        "training_ppl": training.exp().mean(),
        "training_log_ppl": training.mean(),
        "rollout_ppl": sampler.exp().mean(),
        "rollout_log_ppl": sampler.mean(),
        "log_ppl_diff": difference.mean(),
        "log_ppl_abs_diff": difference.abs().mean(),
        "log_ppl_diff_max": difference.max(),
        "log_ppl_diff_min": difference.min(),
        "ppl_ratio": difference.exp().mean(),
        "chi2_token": masked_mean((2 * _within(x)).exp(), mask) - 1,
        "chi2_seq": (2 * _within(rows.sum(x)[counted])).exp().mean() - 1,
    }
    return {name: value.item() for name, value in found.items()}


def weight_metrics(
    raw: Tensor, response_mask: Tensor, rows: Rows, level: str, band: Bounds, normalise: bool = False
) -> dict[str, float]:
    """Of the weights before (`raw`) and after they are cut, without normalisation.

    ```text
    rollout_is_mean, _std, _eff_sample_size            over tokens, of the cut weights; the last is mean(w)^2 / mean(w^2), at most 1
    rollout_is_min, _max                               of the cut weights of tokens; with level "sequence" of the raw weights of rows
    rollout_is_ratio_fraction_high, _low               share of raw weights beyond the band, or beyond 1 / high: of tokens, or of rows
    rollout_is_oob_ratio                               IcePop: share of tokens whose weight became 0
    rollout_is_batch_norm_factor                       `normalise`: what the weights are divided by
    rollout_is_seq_mean, _std, _max, _min              of each row's mean cut weight; _max_deviation is the largest distance to 1
    rollout_is_seq_fraction_high, _low                 share of rows whose mean raw weight is beyond the band
    ```

    Empty when no token is selected; rows without such a token take no part.
    """
    mask = response_mask.bool()
    counted = rows.sum(mask) > 0
    if not counted.any():
        return {}
    cut = _cut(raw, band).double()
    low = band.low or 1 / band.high
    tokens = cut[mask]
    row_cut, row_raw = (rows.mean(weights.double(), mask)[counted] for weights in (cut, raw))
    unit = raw.double()[mask] if level == "token" else row_raw
    spread = tokens if level == "token" else row_raw
    found = {
        "mean": tokens.mean(),
        "std": tokens.std(correction=0),
        "min": spread.min(),
        "max": spread.max(),
        "eff_sample_size": (tokens.mean().square() / tokens.square().mean()).nan_to_num(),  # 0 where every weight is
        "ratio_fraction_high": (unit > band.high).double().mean(),
        "ratio_fraction_low": (unit < low).double().mean(),
        "seq_max_deviation": (row_cut - 1).abs().max(),
        "seq_fraction_high": (row_raw > band.high).double().mean(),
        "seq_fraction_low": (row_raw < low).double().mean(),
    } | {f"seq_{name}": value for name, value in _row_spread(row_cut).items()}
    if normalise:
        mean = (tokens if level == "token" else row_cut).mean()
        found["batch_norm_factor"] = torch.where(mean > 0, mean, 1)
    if band.low:
        found["oob_ratio"] = ((raw < band.low) | (raw > band.high))[mask].double().mean()
    return {f"rollout_is_{name}": float(value) for name, value in found.items()}


def rejection_metrics(statistic: Tensor, response_mask: Tensor, rows: Rows, kind: str, bounds: Bounds) -> dict[str, float]:
    """Of what one kind of rejection looks at (`rejection_statistic`), rollout_rs_{kind}_*:

    ```text
    mean, std                    over tokens; std of the statistic cut to the bounds
    max, min, fraction_high, _low, of tokens, or of rows for all but token_*; share beyond the upper, and for k1 the lower, bound
    seq_mean, _std, _max, _min   of each row's mean; _max_deviation is the largest distance to 0
    seq_fraction_high, _low      share of rows beyond the bounds
    ```

    Under k1 the numbers are those of the inverse ratio, -x and log bounds: verl's sign. Empty when no token is selected.
    """
    mask = response_mask.bool()
    is_k1 = kind.endswith("k1")
    counted = rows.sum(mask) > 0
    if not counted.any():
        return {}
    statistic = -statistic.double() if is_k1 else statistic.double()
    high, low = (math.log(bounds.high), math.log(bounds.low)) if is_k1 else (bounds.high, 0.0)
    tokens = statistic[mask]
    by_row = rows.mean(statistic, mask)[counted]
    unit = tokens if kind.startswith("token") else by_row
    found = {
        "mean": tokens.mean(),
        "std": tokens.clamp(low, high).std(correction=0),
        "max": unit.max(),
        "min": unit.min(),
        "fraction_high": (unit > high).double().mean(),
        "fraction_low": (unit < low).double().mean() if is_k1 else 0.0,
        "seq_max_deviation": by_row.abs().max(),
        "seq_fraction_high": (by_row > high).double().mean(),
    } | {f"seq_{name}": value for name, value in _row_spread(by_row).items()}
    if is_k1:
        found["seq_fraction_low"] = (by_row < low).double().mean()
    return {f"rollout_rs_{kind}_{name}": float(value) for name, value in found.items()}


def _row_spread(values: Tensor) -> dict[str, Tensor]:
    std = values.std() if len(values) > 1 else torch.zeros(())
    return {"mean": values.mean(), "std": std, "max": values.max(), "min": values.min()}


def _within(x: Tensor) -> Tensor:
    return x.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)


def _cut(weights: Tensor, band: Bounds) -> Tensor:
    if band.low > 0:
        return weights * ((weights >= band.low) & (weights <= band.high))
    return weights.clamp(max=band.high)


def _one_each(weights: Tensor, response_mask: Tensor, rows: Rows, level: str) -> Tensor:
    """The weights in float64: one per selected token, or one per row that has such a token."""
    if level == "token":
        return weights.double()[response_mask.bool()]
    return rows.mean(weights.double(), response_mask)[rows.sum(response_mask.bool()) > 0]


def _group_mean(row_values: Tensor, counted: Tensor, group: Tensor | None) -> Tensor:
    """The mean over the counted rows (bool [B]) of each row's group, [B]."""
    if group is None:
        raise ConfigError("rejection by group needs the group of each row")
    index = group.unique(return_inverse=True)[1]

    def over_group(values: Tensor) -> Tensor:
        return torch.zeros_like(values).index_add(0, index, values)[index]

    return over_group(row_values * counted) / over_group(counted.to(row_values.dtype)).clamp(min=1)


def _rejections(rollout_rs: str, threshold: float | str | None) -> tuple[tuple[str, Bounds], ...]:
    kinds = [kind.strip() for kind in rollout_rs.split(",")]
    for kind in kinds:
        if kind not in RS_KINDS:
            raise unknown_name(f"{_SECTION}.rollout_rs", kind, RS_KINDS)
    if threshold is None:
        raise ConfigError(f"{_SECTION}.rollout_rs={rollout_rs} needs {_SECTION}.rollout_rs_threshold")
    thresholds = str(threshold).split(",")
    if len(thresholds) == 1:
        thresholds *= len(kinds)
    if len(thresholds) != len(kinds):
        raise ConfigError(
            f"{_SECTION}.rollout_rs_threshold={threshold} has {len(thresholds)} thresholds for {len(kinds)} kinds of "
            f"rejection ({rollout_rs}); give one for each, or one for all"
        )
    return tuple((kind, _rejection_bounds(kind, text)) for kind, text in zip(kinds, thresholds, strict=True))


def _rejection_bounds(kind: str, text: str) -> Bounds:
    bounds = _bounds(f"{_SECTION}.rollout_rs_threshold", text)
    if not kind.endswith("k1"):
        if "_" in text:
            raise ConfigError(f"{_SECTION}.rollout_rs={kind} takes one upper bound, not {text!r}")
        return bounds
    if bounds.low == 0:
        if bounds.high < 1:
            raise ConfigError(
                f"{_SECTION}.rollout_rs={kind} bounds a ratio that is 1 when the policies agree; {text} excludes it. Set at least "
                "1, or write two bounds, both with a decimal point: 0.5_2.0"
            )
        bounds = Bounds(1 / bounds.high, bounds.high)
    return bounds


def _bounds(key: str, text: str) -> Bounds:
    """ "high" or "low_high"."""
    parts = text.split("_")
    try:
        numbers = [float(part) for part in parts]
    except ValueError:
        numbers = []
    if len(numbers) not in (1, 2) or not all(math.isfinite(n) and n > 0 for n in numbers):
        raise ConfigError(f'{key}={text} cannot be read; expected a positive number such as 2.0, or two such as "0.5_2.0"')
    low, high = ([0.0] + numbers)[-2:]
    if len(numbers) == 2 and not low <= 1 <= high:
        raise ConfigError(f"{key}={text} leaves out 1, the ratio of policies that agree; expected low <= 1 <= high")
    return Bounds(low, high)
