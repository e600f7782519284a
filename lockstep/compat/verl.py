"""The algorithms under verl's names and argument order, so that a recipe imports them by changing the package name.

Thin adapters over `lockstep.algorithms`, which is where the formulas are. What they change on the way:

- `index`, a numpy array of prompt ids, becomes the group of each row.
- Losses come aggregated over the batch that is given, as (loss, metrics): `Denominators.of` that batch, unless `config` has a
  `global_batch_info` with the counts of a larger one.
- The returns of outcome estimators are their advantages.

docs/algorithms/verl.md lists where the numbers differ from verl's, and why. A policy loss of one's own is registered in Lockstep's
form, which returns the loss per token: an aggregated loss could not be independent of the micro-batches.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.algorithms import advantages as estimators
from lockstep.algorithms import aggregation, kl, masked, policy_losses
from lockstep.algorithms.advantages import group as group_estimators
from lockstep.algorithms.advantages import returns as return_estimators
from lockstep.algorithms.advantages import token_baseline
from lockstep.algorithms.kl import AdaptiveKLController, FixedKLController, KLController
from lockstep.algorithms.policy_losses import covariance
from lockstep.algorithms.policy_losses.per_token import vanilla
from lockstep.algorithms.policy_losses.ratio import clipped_surrogate, token_log_ratio
from lockstep.algorithms.value_losses import clipped_value_loss
from lockstep.config.actor_rollout_ref import ActorConfig
from lockstep.config.algorithm import AlgorithmConfig

__all__ = [
    "AdaptiveKLController",
    "AdvantageEstimator",
    "FixedKLController",
    "agg_loss",
    "compute_entropy_loss",
    "compute_gae_advantage_return",
    "compute_gdpo_outcome_advantage",
    "compute_gpg_outcome_advantage",
    "compute_grpo_outcome_advantage",
    "compute_grpo_passk_outcome_advantage",
    "compute_grpo_vectorized_outcome_advantage",
    "compute_multi_turn_optimal_token_baseline_advantage",
    "compute_opo_outcome_advantage",
    "compute_optimal_token_baseline_advantage",
    "compute_policy_loss",
    "compute_policy_loss_cispo",
    "compute_policy_loss_clip_cov",
    "compute_policy_loss_dppo_kl",
    "compute_policy_loss_dppo_tv",
    "compute_policy_loss_dro",
    "compute_policy_loss_geo_mean",
    "compute_policy_loss_gpg",
    "compute_policy_loss_gspo",
    "compute_policy_loss_kl_cov",
    "compute_policy_loss_sapo",
    "compute_policy_loss_vanilla",
    "compute_reinforce_plus_plus_baseline_outcome_advantage",
    "compute_reinforce_plus_plus_outcome_advantage",
    "compute_remax_outcome_advantage",
    "compute_rewards",
    "compute_rloo_outcome_advantage",
    "compute_rloo_vectorized_outcome_advantage",
    "compute_value_loss",
    "get_adv_estimator_fn",
    "get_kl_controller",
    "get_policy_loss_fn",
    "kl_penalty",
    "kl_penalty_forward",
    "masked_mean",
    "masked_whiten",
    "register_adv_est",
    "register_policy_loss",
]

Advantages = tuple[Tensor, Tensor]
Index = np.ndarray | Tensor


class AdvantageEstimator(StrEnum):
    """verl's names of the estimators."""

    GAE = "gae"
    GRPO = "grpo"
    REINFORCE_PLUS_PLUS = "reinforce_plus_plus"
    REINFORCE_PLUS_PLUS_BASELINE = "reinforce_plus_plus_baseline"
    REMAX = "remax"
    RLOO = "rloo"
    OPO = "opo"
    GRPO_PASSK = "grpo_passk"
    GPG = "gpg"
    RLOO_VECTORIZED = "rloo_vectorized"
    GRPO_VECTORIZED = "grpo_vectorized"
    OPTIMAL_TOKEN_BASELINE = "optimal_token_baseline"
    TIR_OPTIMAL_TOKEN_BASELINE = "tir_optimal_token_baseline"
    GDPO = "gdpo"


# -- masks -----------------------------------------------------------------------------------------------------------------


def masked_mean(values: Tensor, mask: Tensor, axis: int | None = None) -> Tensor:
    """Mean over the mask along `axis`; 0 where nothing is selected."""
    return masked.masked_mean(values, mask, axis)


def masked_whiten(values: Tensor, mask: Tensor, shift_mean: bool = True) -> Tensor:
    """(values - mean) / sqrt(var + 1e-8) over the mask, 0 outside."""
    return masked.masked_whiten(values, mask, shift_mean)


# -- advantages ------------------------------------------------------------------------------------------------------------


def compute_gae_advantage_return(
    token_level_rewards: Tensor, values: Tensor, response_mask: Tensor, gamma: float | Tensor, lam: float | Tensor
) -> Advantages:
    """`advantages.gae`: whitened advantages, and returns."""
    return estimators.gae(
        token_level_rewards=token_level_rewards, response_mask=response_mask, values=values, gamma=float(gamma), lam=float(lam)
    )


def compute_grpo_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Index,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
    config: Any = None,
) -> Advantages:
    """`group.grpo`."""
    return _twice(
        group_estimators.grpo(
            token_level_rewards=token_level_rewards,
            response_mask=response_mask,
            group=_group(index, response_mask),
            norm_adv_by_std_in_grpo=norm_adv_by_std_in_grpo,
            epsilon=epsilon,
        )
    )


compute_grpo_vectorized_outcome_advantage = compute_grpo_outcome_advantage


def compute_gdpo_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Index,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
    config: Any = None,
    non_tensor_batch: Mapping[str, Any] | None = None,
    batch: Any = None,
    **kwargs: Any,
) -> Advantages:
    """`returns.gdpo` of the parts that `config.gdpo_reward_keys` names in `non_tensor_batch`; of the reward itself without keys."""
    keys, weights = _value(config, "gdpo_reward_keys"), _value(config, "gdpo_reward_weights")
    scores = masked.masked_sum(token_level_rewards, response_mask, dim=-1)
    parts = [scores]
    if keys:
        found = non_tensor_batch or {}
        parts = [torch.as_tensor(np.asarray(found[key], dtype=np.float64)).to(scores) for key in keys]
    return _twice(
        return_estimators.gdpo(
            token_level_rewards=token_level_rewards,
            response_mask=response_mask,
            group=_group(index, response_mask),
            reward_parts=torch.stack(parts, dim=1),
            reward_part_weights=torch.tensor(list(weights), dtype=torch.float64) if keys and weights else None,
            norm_adv_by_std_in_grpo=norm_adv_by_std_in_grpo,
            epsilon=epsilon,
        )
    )


def compute_grpo_passk_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Index,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
    config: Any = None,
    **kwargs: Any,
) -> Advantages:
    """`group.grpo_passk`. `config.norm_adv_by_std_in_grpo`, where there is a config, comes before the argument, as in verl."""
    by_std = _value(config, "norm_adv_by_std_in_grpo")
    return _twice(
        group_estimators.grpo_passk(
            token_level_rewards=token_level_rewards,
            response_mask=response_mask,
            group=_group(index, response_mask),
            norm_adv_by_std_in_grpo=norm_adv_by_std_in_grpo if by_std is None else by_std,
            epsilon=epsilon,
        )
    )


def compute_reinforce_plus_plus_baseline_outcome_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, index: Index, epsilon: float = 1e-6, config: Any = None, **kwargs: Any
) -> Advantages:
    """`returns.reinforce_plus_plus_baseline`. `epsilon` is not read."""
    return _twice(_of_groups(return_estimators.reinforce_plus_plus_baseline, token_level_rewards, response_mask, index))


def compute_rloo_outcome_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, index: Index, epsilon: float = 1e-6, config: Any = None, **kwargs: Any
) -> Advantages:
    """`group.rloo`. `epsilon` is not read."""
    return _twice(_of_groups(group_estimators.rloo, token_level_rewards, response_mask, index))


compute_rloo_vectorized_outcome_advantage = compute_rloo_outcome_advantage


def compute_opo_outcome_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, index: Index, epsilon: float = 1e-6, config: Any = None, **kwargs: Any
) -> Advantages:
    """`group.opo`. `epsilon` is not read."""
    return _twice(_of_groups(group_estimators.opo, token_level_rewards, response_mask, index))


def compute_gpg_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Index,
    epsilon: float = 1e-6,
    f_norm: float = 1.0,
    alpha: float = 1.0,
    config: Any = None,
    **kwargs: Any,
) -> Advantages:
    """`group.gpg` divided by `f_norm`. `epsilon` and `alpha` are not read: alpha follows from the batch."""
    advantages, _ = _of_groups(group_estimators.gpg, token_level_rewards, response_mask, index)
    return advantages / f_norm, advantages / f_norm


def compute_reinforce_plus_plus_outcome_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, config: Any = None, **kwargs: Any
) -> Advantages:
    """`returns.reinforce_plus_plus` with `config.gamma`."""
    gamma = _value(config, "gamma", AlgorithmConfig().gamma)
    return return_estimators.reinforce_plus_plus(token_level_rewards=token_level_rewards, response_mask=response_mask, gamma=gamma)


def compute_remax_outcome_advantage(
    token_level_rewards: Tensor, reward_baselines: Tensor, response_mask: Tensor, config: Any = None, **kwargs: Any
) -> Advantages:
    """`returns.remax`."""
    return return_estimators.remax(
        token_level_rewards=token_level_rewards, response_mask=response_mask, reward_baselines=reward_baselines
    )


def compute_optimal_token_baseline_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Index,
    old_log_probs: Tensor,
    sum_pi_squared: Tensor,
    rollout_is_weights: Tensor | None = None,
    handle_zero_tail: bool = True,
    epsilon: float = 1e-8,
    **kwargs: Any,
) -> Advantages:
    """The optimal token baseline with tokens compared at the same *position*: for responses of one turn.

    `handle_zero_tail` and `epsilon` are not read: the baseline is 0 wherever a row is alone, and weights have a floor of 1e-12.
    """
    returns, weights = token_baseline.returns_and_energy(
        token_level_rewards, response_mask, old_log_probs, sum_pi_squared, rollout_is_weights
    )
    return token_baseline.against_column(returns, weights, response_mask, _group(index, response_mask)), returns


def compute_multi_turn_optimal_token_baseline_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Index,
    old_log_probs: Tensor,
    sum_pi_squared: Tensor,
    rollout_is_weights: Tensor | None = None,
    handle_zero_tail: bool = True,
    epsilon: float = 1e-8,
    **kwargs: Any,
) -> Advantages:
    """`token_baseline.optimal_token_baseline`: the k-th tokens of the policy are compared, whatever lies between them."""
    return token_baseline.optimal_token_baseline(
        token_level_rewards=token_level_rewards,
        response_mask=response_mask,
        group=_group(index, response_mask),
        old_log_probs=old_log_probs,
        sum_pi_squared=sum_pi_squared,
        rollout_is_weights=rollout_is_weights,
    )


_ADVANTAGES: dict[str, Callable[..., Advantages]] = {
    AdvantageEstimator.GAE: compute_gae_advantage_return,
    AdvantageEstimator.GRPO: compute_grpo_outcome_advantage,
    AdvantageEstimator.REINFORCE_PLUS_PLUS: compute_reinforce_plus_plus_outcome_advantage,
    AdvantageEstimator.REINFORCE_PLUS_PLUS_BASELINE: compute_reinforce_plus_plus_baseline_outcome_advantage,
    AdvantageEstimator.REMAX: compute_remax_outcome_advantage,
    AdvantageEstimator.RLOO: compute_rloo_outcome_advantage,
    AdvantageEstimator.OPO: compute_opo_outcome_advantage,
    AdvantageEstimator.GRPO_PASSK: compute_grpo_passk_outcome_advantage,
    AdvantageEstimator.GPG: compute_gpg_outcome_advantage,
    AdvantageEstimator.RLOO_VECTORIZED: compute_rloo_vectorized_outcome_advantage,
    AdvantageEstimator.GRPO_VECTORIZED: compute_grpo_vectorized_outcome_advantage,
    AdvantageEstimator.OPTIMAL_TOKEN_BASELINE: compute_optimal_token_baseline_advantage,
    AdvantageEstimator.TIR_OPTIMAL_TOKEN_BASELINE: compute_multi_turn_optimal_token_baseline_advantage,
    AdvantageEstimator.GDPO: compute_gdpo_outcome_advantage,
}


def register_adv_est(name_or_enum: str | AdvantageEstimator) -> Callable[[Callable[..., Advantages]], Callable[..., Advantages]]:
    """Make the decorated function an estimator of `algorithm.adv_estimator`; written for verl or for Lockstep.

    Arguments are matched by name with Lockstep's vocabulary (`lockstep.algorithms.advantages`), which has verl's `index` and `config`.
    Raises ConfigError when the name is taken.
    """

    def decorate(function: Callable[..., Advantages]) -> Callable[..., Advantages]:
        estimators.register_adv_est(str(name_or_enum))(_by_keyword(function))
        return function

    return decorate


def get_adv_estimator_fn(name_or_enum: str | AdvantageEstimator) -> Callable[..., Advantages]:
    """The function above of that name, or the estimator that was registered; ConfigError when there is none."""
    name = str(name_or_enum)
    return _ADVANTAGES[name] if name in _ADVANTAGES else estimators.get_adv_estimator(name)


def _by_keyword(function: Callable[..., Advantages]) -> Callable[..., Advantages]:
    """The function with the same arguments, keyword-only; **kwargs, which verl asks for, has nothing to take."""

    @functools.wraps(function)
    def call(**inputs: Any) -> Advantages:
        return function(**inputs)

    parameters = inspect.signature(function).parameters.values()
    named = [p.replace(kind=p.KEYWORD_ONLY) for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    call.__signature__ = inspect.Signature(named)  # type: ignore[attr-defined]
    return call


# -- rewards and KL --------------------------------------------------------------------------------------------------------


def compute_rewards(token_level_scores: Tensor, old_log_prob: Tensor, ref_log_prob: Tensor, kl_ratio: float) -> Tensor:
    """The scores less kl_ratio (old_log_prob - ref_log_prob)."""
    return token_level_scores - kl_ratio * kl.kl_penalty(old_log_prob, ref_log_prob, "kl")


def kl_penalty(logprob: Tensor, ref_logprob: Tensor, kl_penalty: str) -> Tensor:
    """`kl.kl_penalty`: kl, k1, abs, mse, k2, low_var_kl, k3, each also with a final +."""
    return kl.kl_penalty(logprob, ref_logprob, kl_penalty)


def kl_penalty_forward(logprob: Tensor, ref_logprob: Tensor, kl_penalty: str) -> Tensor:
    """The same without the straight-through gradient of a final +."""
    return kl.kl_penalty(logprob, ref_logprob, kl_penalty.removesuffix("+"))


def get_kl_controller(kl_ctrl: Any) -> KLController:
    """The controller that a section like `algorithm.kl_ctrl` describes."""
    adaptive = {name: _value(kl_ctrl, name) for name in ("target_kl", "horizon")}
    return kl.make_kl_controller(
        _value(kl_ctrl, "type"), _value(kl_ctrl, "kl_coef"), adaptive["target_kl"] or 0.0, adaptive["horizon"] or 0
    )


# -- losses ----------------------------------------------------------------------------------------------------------------


def agg_loss(
    loss_mat: Tensor,
    loss_mask: Tensor,
    loss_agg_mode: str,
    dp_size: int = 1,
    batch_num_tokens: int | Tensor | None = None,
    global_batch_size: int | Tensor | None = None,
    loss_scale_factor: float | None = None,
) -> Tensor:
    """`aggregation.agg_loss` times `dp_size`, over the given counts, or those of this batch where none are given.

    seq-mean-token-sum-norm divides by the width of the mask unless `loss_scale_factor` is given.
    """
    here = aggregation.Denominators.of(loss_mask)
    denominators = aggregation.Denominators(
        tokens=here.tokens if batch_num_tokens is None else int(batch_num_tokens),
        sequences=here.sequences if global_batch_size is None else int(global_batch_size),
    )
    scale = float(loss_mask.shape[-1]) if loss_scale_factor is None else loss_scale_factor
    return aggregation.agg_loss(loss_mat, loss_mask, loss_agg_mode, denominators, scale) * dp_size


def compute_policy_loss(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    cliprange: float | None = None,
    cliprange_low: float | None = None,
    cliprange_high: float | None = None,
    clip_ratio_c: float = 3.0,
    loss_agg_mode: str = "token-mean",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The vanilla loss as (pg_loss, pg_clipfrac, ppo_kl, pg_clipfrac_lower). verl calls it deprecated."""
    low, high = (cliprange if bound is None else bound for bound in (cliprange_low, cliprange_high))
    if low is None or high is None:
        raise ValueError("compute_policy_loss needs cliprange, or both cliprange_low and cliprange_high")
    loss, metrics = vanilla(
        old_log_prob=old_log_prob,
        log_prob=log_prob,
        advantages=advantages,
        response_mask=response_mask,
        clip_ratio_low=low,
        clip_ratio_high=high,
        clip_ratio_c=clip_ratio_c,
    )
    means = {name: masked.masked_mean(values, response_mask) for name, values in metrics.items()}
    total = agg_loss(loss, response_mask, loss_agg_mode)
    return total, means["pg_clipfrac"], means["ppo_kl"], means["pg_clipfrac_lower"]


PolicyLossFn = Callable[..., tuple[Tensor, dict[str, float]]]


def _policy_loss_fn(name: str, default_mode: str = "token-mean", only_mode: str | None = None) -> PolicyLossFn:
    def compute(
        old_log_prob: Tensor,
        log_prob: Tensor,
        advantages: Tensor,
        response_mask: Tensor,
        loss_agg_mode: str = default_mode,
        config: Any = None,
        rollout_is_weights: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, float]]:
        loss_fn = policy_losses.get_policy_loss(name)
        available = _loss_parameters(config) | {
            "old_log_prob": old_log_prob,
            "log_prob": log_prob,
            "advantages": advantages,
            "response_mask": response_mask,
        }
        if name in ("clip_cov", "kl_cov"):
            available["cov_selected"] = _choose_by_covariance(name, available)
        loss, metrics = policy_losses.compute_policy_loss(loss_fn, available)
        if rollout_is_weights is not None:
            loss = loss * masked.zero_outside(rollout_is_weights, response_mask)
        total = agg_loss(loss, response_mask, only_mode or loss_agg_mode, **(_value(config, "global_batch_info") or {}))
        means = {f"actor/{key}": masked.masked_mean(values, response_mask).item() for key, values in metrics.items()}
        return total, means

    compute.__name__ = compute.__qualname__ = f"compute_policy_loss_{name}"
    fixed = f" Always aggregated as {only_mode}." if only_mode else ""
    compute.__doc__ = (
        f"The policy loss {name!r} of a whole batch, as (loss, metrics). `config` is like actor_rollout_ref.actor.{fixed}"
    )
    return compute


def _choose_by_covariance(name: str, available: Mapping[str, Any]) -> Tensor:
    """As verl does: from the current log-probs, and never a token that the clip already holds."""
    log_prob, mask, advantages = (available[key] for key in ("log_prob", "response_mask", "advantages"))
    row_keys = torch.arange(mask.shape[0], device=mask.device)
    current = {"old_log_prob": log_prob.detach(), "advantages": advantages, "response_mask": mask, "row_keys": row_keys}
    if name == "kl_cov":
        return covariance.choose_kl_cov(**current, kl_cov_ratio=available["kl_cov_ratio"])["cov_selected"]
    ratio = token_log_ratio(log_prob.detach(), available["old_log_prob"], mask).exp()
    bounds = available["clip_ratio_low"], available["clip_ratio_high"]
    _, is_clipped = clipped_surrogate(masked.zero_outside(advantages, mask), ratio, *bounds)
    limits = {key: available[key] for key in ("clip_cov_ratio", "clip_cov_lb", "clip_cov_ub")}
    return covariance.choose_clip_cov(**current, **limits, eligible=~is_clipped)["cov_selected"]


compute_policy_loss_vanilla = _policy_loss_fn("vanilla")
compute_policy_loss_dppo_tv = _policy_loss_fn("dppo_tv")
compute_policy_loss_dppo_kl = _policy_loss_fn("dppo_kl")
compute_policy_loss_gspo = _policy_loss_fn("gspo", "seq-mean-token-mean", only_mode="seq-mean-token-mean")
compute_policy_loss_sapo = _policy_loss_fn("sapo", "seq-mean-token-mean", only_mode="seq-mean-token-mean")
compute_policy_loss_gpg = _policy_loss_fn("gpg")
compute_policy_loss_clip_cov = _policy_loss_fn("clip_cov")
compute_policy_loss_kl_cov = _policy_loss_fn("kl_cov")
compute_policy_loss_geo_mean = _policy_loss_fn("geo_mean", only_mode="seq-mean-token-mean")
compute_policy_loss_dro = _policy_loss_fn("dro")
compute_policy_loss_cispo = _policy_loss_fn("cispo")

_LOSSES: dict[str, PolicyLossFn] = {
    "vanilla": compute_policy_loss_vanilla,
    "dppo_tv": compute_policy_loss_dppo_tv,
    "dppo_kl": compute_policy_loss_dppo_kl,
    "gspo": compute_policy_loss_gspo,
    "sapo": compute_policy_loss_sapo,
    "gpg": compute_policy_loss_gpg,
    "clip_cov": compute_policy_loss_clip_cov,
    "kl_cov": compute_policy_loss_kl_cov,
    "geo_mean": compute_policy_loss_geo_mean,
    "dro": compute_policy_loss_dro,
    "cispo": compute_policy_loss_cispo,
}

register_policy_loss = policy_losses.register_policy_loss


def get_policy_loss_fn(name: str) -> PolicyLossFn:
    """The function above of that name, or one like it for a loss that was registered; ConfigError when there is none."""
    policy_losses.get_policy_loss(name)
    return _LOSSES[name] if name in _LOSSES else _policy_loss_fn(name)


def compute_entropy_loss(logits: Tensor, response_mask: Tensor, loss_agg_mode: str = "token-mean") -> Tensor:
    """The entropy of softmax(logits) [B, T, V], aggregated."""
    log_probs = torch.log_softmax(logits, dim=-1)
    entropy = -(log_probs.exp() * log_probs.masked_fill(log_probs == -torch.inf, 0)).sum(dim=-1)
    return agg_loss(entropy, response_mask, loss_agg_mode)


def compute_value_loss(
    vpreds: Tensor,
    returns: Tensor,
    values: Tensor,
    response_mask: Tensor,
    cliprange_value: float,
    loss_agg_mode: str = "token-mean",
) -> tuple[Tensor, Tensor]:
    """`value_losses.clipped_value_loss`, aggregated, and the share of clipped tokens."""
    loss, metrics = clipped_value_loss(
        vpreds=vpreds, values=values, returns=returns, response_mask=response_mask, cliprange_value=cliprange_value
    )
    return agg_loss(loss, response_mask, loss_agg_mode), masked.masked_mean(metrics["vf_clipfrac"], response_mask)


# -- helpers ---------------------------------------------------------------------------------------------------------------


def _group(index: Index, response_mask: Tensor) -> Tensor:
    """Prompt ids of any kind as numbers [B]."""
    ids = index.cpu().numpy() if isinstance(index, Tensor) else np.asarray(index)
    return torch.from_numpy(np.unique(ids.astype(str), return_inverse=True)[1]).to(response_mask.device)


def _of_groups(estimator: Callable[..., Advantages], rewards: Tensor, response_mask: Tensor, index: Index) -> Advantages:
    return estimator(token_level_rewards=rewards, response_mask=response_mask, group=_group(index, response_mask))


def _twice(result: Advantages) -> Advantages:
    """verl's outcome estimators return their advantages as returns too."""
    return result[0], result[0]


def _value(config: Any, name: str, default: Any = None) -> Any:
    """A value of a dataclass, an OmegaConf node or a mapping; the default where it has none."""
    if isinstance(config, Mapping):
        return config.get(name, default)
    return getattr(config, name, default)


def _loss_parameters(config: Any) -> dict[str, Any]:
    """The parameters of the losses from a section like `actor_rollout_ref.actor`; our defaults where it says nothing."""
    defaults = ActorConfig()
    if config is None or isinstance(config, ActorConfig):
        return (config or defaults).loss_parameters
    clip = _value(config, "clip_ratio", defaults.clip_ratio)
    given = {name: _value(config, name) for name in ("clip_ratio_low", "clip_ratio_high")}
    found = defaults.loss_parameters | {name: clip if value is None else value for name, value in given.items()}
    own = _value(config, "policy_loss")
    for name in found:
        value = next((v for v in (_value(own, name), _value(config, name)) if v is not None), None)
        found[name] = found[name] if value is None else value
    return found
