"""The algorithms under verl's names and argument order: verl's module `trainer.ppo.core_algos`.

Thin adapters over `lockstep.algorithms`, where the formulas are. Padded blocks [B, T] are read as B rows of T tokens; `index`, an array of
prompt ids, becomes the group of each row. Losses are aggregated over the given batch, as (loss, metrics), unless `config` has a
`global_batch_info` with the counts of a larger one. docs/algorithms/verl.md lists where the numbers differ from verl's, and why.
"""

from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.algorithms import advantages as estimators
from lockstep.algorithms import aggregation, blocks, kl, masking, policy_losses
from lockstep.algorithms.registry import input_names, registering
from lockstep.algorithms.rows import Rows
from lockstep.algorithms.value_losses import clipped_value_loss
from lockstep.config.actor_rollout_ref import ActorConfig
from lockstep.config.algorithm import AlgorithmConfig
from lockstep.errors import ConfigError

Advantages = tuple[Tensor, Tensor]
EstimatorFn = Callable[..., Advantages]
PolicyLossFn = Callable[..., tuple[Tensor, dict[str, float]]]
Uids = Any
"""The prompt of each row: an array or a list of any kind."""

AdaptiveKLController = kl.AdaptiveKLController
FixedKLController = kl.FixedKLController
masked_mean = masking.masked_mean
masked_whiten = masking.masked_whiten

_ROW_MEAN = "seq-mean-token-mean"


# -- advantages


def _estimate(estimator: estimators.AdvantageEstimator, inputs: dict[str, Any]) -> Advantages:
    """Advantages and returns of an estimator, which takes from `inputs` what it reads."""
    return blocks.estimate(estimator, inputs)


def _outcome(estimator: estimators.AdvantageEstimator, inputs: dict[str, Any]) -> Advantages:
    """The advantages, twice: verl returns them as returns, too."""
    advantages, _ = blocks.estimate(estimator, inputs)
    return advantages, advantages


def compute_gae_advantage_return(
    token_level_rewards: Tensor, values: Tensor, response_mask: Tensor, gamma: float, lam: float
) -> Advantages:
    return _estimate(estimators.gae, locals())


def compute_grpo_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Uids,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
    config: Any = None,
) -> Advantages:
    return _outcome(estimators.grpo, locals())


def compute_grpo_passk_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Uids,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
    config: Any = None,
    **kwargs: Any,
) -> Advantages:
    norm_adv_by_std_in_grpo = _value(config, "norm_adv_by_std_in_grpo", norm_adv_by_std_in_grpo)
    return _outcome(estimators.grpo_passk, locals())


def compute_gdpo_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Uids,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
    config: Any = None,
    non_tensor_batch: Mapping[str, Any] | None = None,
    batch: Any = None,
    **kwargs: Any,
) -> Advantages:
    """Reads the parts that `config.gdpo_reward_keys` names in `non_tensor_batch`; the whole reward if there are no keys."""
    keys = _value(config, "gdpo_reward_keys")
    weights = _value(config, "gdpo_reward_weights")
    parts = [masking.masked_sum(token_level_rewards, response_mask, dim=-1)]
    if keys:
        columns = non_tensor_batch or {}
        parts = [torch.as_tensor(np.asarray(columns[key], dtype=np.float64)).to(parts[0]) for key in keys]
    reward_parts = torch.stack(parts, dim=1)
    reward_part_weights = torch.tensor(list(weights), dtype=torch.float64) if keys and weights else None
    return _outcome(estimators.gdpo, locals())


def compute_rloo_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Uids,
    epsilon: float = 1e-6,
    config: Any = None,
    **kwargs: Any,
) -> Advantages:
    return _outcome(estimators.rloo, locals())


def compute_opo_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Uids,
    epsilon: float = 1e-6,
    config: Any = None,
    **kwargs: Any,
) -> Advantages:
    return _outcome(estimators.opo, locals())


def compute_gpg_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Uids,
    epsilon: float = 1e-6,
    f_norm: float = 1.0,
    alpha: float = 1.0,
    config: Any = None,
    **kwargs: Any,
) -> Advantages:
    advantages, _ = _estimate(estimators.gpg, locals())
    return advantages / f_norm, advantages / f_norm


def compute_reinforce_plus_plus_baseline_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Uids,
    epsilon: float = 1e-6,
    config: Any = None,
    **kwargs: Any,
) -> Advantages:
    return _outcome(estimators.reinforce_plus_plus_baseline, locals())


def compute_reinforce_plus_plus_outcome_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, config: Any = None, **kwargs: Any
) -> Advantages:
    gamma = _value(config, "gamma", kwargs.get("gamma", AlgorithmConfig().gamma))
    return _estimate(estimators.reinforce_plus_plus, locals())


def compute_remax_outcome_advantage(
    token_level_rewards: Tensor, reward_baselines: Tensor, response_mask: Tensor, config: Any = None, **kwargs: Any
) -> Advantages:
    return _estimate(estimators.remax, locals())


def compute_optimal_token_baseline_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Uids,
    old_log_probs: Tensor,
    sum_pi_squared: Tensor,
    rollout_is_weights: Tensor | None = None,
    handle_zero_tail: bool = True,
    epsilon: float = 1e-8,
    **kwargs: Any,
) -> Advantages:
    return _estimate(estimators.token_baseline.same_position_baseline, locals())


def compute_multi_turn_optimal_token_baseline_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Uids,
    old_log_probs: Tensor,
    sum_pi_squared: Tensor,
    rollout_is_weights: Tensor | None = None,
    handle_zero_tail: bool = True,
    epsilon: float = 1e-8,
    **kwargs: Any,
) -> Advantages:
    return _estimate(estimators.optimal_token_baseline, locals())


compute_grpo_vectorized_outcome_advantage = compute_grpo_outcome_advantage
compute_rloo_vectorized_outcome_advantage = compute_rloo_outcome_advantage

ADV_ESTIMATOR_REGISTRY: dict[str, EstimatorFn] = {
    "gae": compute_gae_advantage_return,
    "grpo": compute_grpo_outcome_advantage,
    "grpo_vectorized": compute_grpo_vectorized_outcome_advantage,
    "grpo_passk": compute_grpo_passk_outcome_advantage,
    "gdpo": compute_gdpo_outcome_advantage,
    "rloo": compute_rloo_outcome_advantage,
    "rloo_vectorized": compute_rloo_vectorized_outcome_advantage,
    "opo": compute_opo_outcome_advantage,
    "gpg": compute_gpg_outcome_advantage,
    "reinforce_plus_plus_baseline": compute_reinforce_plus_plus_baseline_outcome_advantage,
    "reinforce_plus_plus": compute_reinforce_plus_plus_outcome_advantage,
    "remax": compute_remax_outcome_advantage,
    "optimal_token_baseline": compute_optimal_token_baseline_advantage,
    "tir_optimal_token_baseline": compute_multi_turn_optimal_token_baseline_advantage,
}
"""verl's name -> the function above, or one that was registered."""

AdvantageEstimator = StrEnum("AdvantageEstimator", {key.upper(): key for key in ADV_ESTIMATOR_REGISTRY})  # type: ignore[misc]
"""verl's names of the estimators."""


def register_adv_est(name_or_enum: Any) -> Callable[[EstimatorFn], EstimatorFn]:
    """Return a decorator that makes a function an estimator of `algorithm.adv_estimator`.

    The function may be written for verl or for Lockstep, whose vocabulary (`lockstep.algorithms.advantages`) has verl's `index` and
    `config`. The decorator raises ConfigError if the name is another function's.
    """
    name = getattr(name_or_enum, "value", name_or_enum)

    def decorate(function: EstimatorFn) -> EstimatorFn:
        registering("advantage estimator", ADV_ESTIMATOR_REGISTRY, name)(function)
        return estimators.register_adv_est(name)(function)

    return decorate


def get_adv_estimator_fn(name_or_enum: Any) -> EstimatorFn:
    """Return the function above of that name, or the registered estimator. Raise ConfigError if there is none."""
    name = getattr(name_or_enum, "value", name_or_enum)
    if name in ADV_ESTIMATOR_REGISTRY:
        return ADV_ESTIMATOR_REGISTRY[name]
    return estimators.get_adv_estimator(name)


# -- losses


def agg_loss(
    loss_mat: Tensor,
    loss_mask: Tensor,
    loss_agg_mode: str,
    dp_size: int = 1,
    batch_num_tokens: int | Tensor | None = None,
    global_batch_size: int | Tensor | None = None,
    loss_scale_factor: float | None = None,
) -> Tensor:
    """Return `aggregation.agg_loss` times `dp_size`.

    Counts that are not given are those of this batch. seq-mean-token-sum-norm divides by `loss_scale_factor`, or by the width of the mask.
    """
    loss = loss_mat.flatten()
    mask = loss_mask.flatten()
    rows = Rows.of_padded(loss_mask)
    here = aggregation.Denominators.of(mask, rows)
    tokens = here.tokens if batch_num_tokens is None else int(batch_num_tokens)
    sequences = here.sequences if global_batch_size is None else int(global_batch_size)
    denominators = aggregation.Denominators(tokens, sequences)
    scale = float(loss_mask.shape[-1]) if loss_scale_factor is None else loss_scale_factor
    return aggregation.agg_loss(loss, mask, loss_agg_mode, denominators, rows, scale) * dp_size


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
    """Return the vanilla loss as (pg_loss, pg_clipfrac, ppo_kl, pg_clipfrac_lower). verl calls this function deprecated."""
    low = cliprange if cliprange_low is None else cliprange_low
    high = cliprange if cliprange_high is None else cliprange_high
    if low is None or high is None:
        raise ValueError("compute_policy_loss needs cliprange, or both cliprange_low and cliprange_high")
    numbers = {"clip_ratio_low": low, "clip_ratio_high": high, "clip_ratio_c": clip_ratio_c}
    loss, means = blocks.policy_loss("vanilla", numbers, (old_log_prob, log_prob, advantages, response_mask))
    return agg_loss(loss, response_mask, loss_agg_mode), means["pg_clipfrac"], means["ppo_kl"], means["pg_clipfrac_lower"]


def _policy_loss_fn(name: str) -> PolicyLossFn:
    only_mode = _ROW_MEAN if name in ("sapo", "geo_mean") else None
    default_mode = _ROW_MEAN if name in ("gspo", "sapo") else "token-mean"

    def compute(
        old_log_prob: Tensor,
        log_prob: Tensor,
        advantages: Tensor,
        response_mask: Tensor,
        loss_agg_mode: str = default_mode,
        config: Any = None,
        rollout_is_weights: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, float]]:
        loss, means = blocks.policy_loss(name, _loss_parameters(config), (old_log_prob, log_prob, advantages, response_mask))
        if rollout_is_weights is not None:
            loss = loss * masking.zero_outside(rollout_is_weights, response_mask)
        counts = _value(config, "global_batch_info") or {}
        total = agg_loss(loss, response_mask, only_mode or loss_agg_mode, **counts)
        return total, {f"actor/{key}": mean.item() for key, mean in means.items()}

    compute.__name__ = compute.__qualname__ = f"compute_policy_loss_{name}"
    fixed = f" It is always aggregated as {only_mode}." if only_mode else ""
    compute.__doc__ = (
        f"Return the policy loss {name!r} of a batch, and its metrics. `config` is like actor_rollout_ref.actor.{fixed}"
    )
    return compute


POLICY_LOSS_REGISTRY: dict[str, PolicyLossFn] = {name: _policy_loss_fn(name) for name in policy_losses.POLICY_LOSSES}
"""verl's name -> the policy loss as (loss, metrics) of a batch; `compute_policy_loss_{name}` is the same."""

compute_policy_loss_vanilla = POLICY_LOSS_REGISTRY["vanilla"]
compute_policy_loss_gspo = POLICY_LOSS_REGISTRY["gspo"]
compute_policy_loss_sapo = POLICY_LOSS_REGISTRY["sapo"]
compute_policy_loss_gpg = POLICY_LOSS_REGISTRY["gpg"]
compute_policy_loss_clip_cov = POLICY_LOSS_REGISTRY["clip_cov"]
compute_policy_loss_kl_cov = POLICY_LOSS_REGISTRY["kl_cov"]
compute_policy_loss_geo_mean = POLICY_LOSS_REGISTRY["geo_mean"]
compute_policy_loss_cispo = POLICY_LOSS_REGISTRY["cispo"]
compute_policy_loss_dro = POLICY_LOSS_REGISTRY["dro"]
compute_policy_loss_dppo_tv = POLICY_LOSS_REGISTRY["dppo_tv"]
compute_policy_loss_dppo_kl = POLICY_LOSS_REGISTRY["dppo_kl"]


def register_policy_loss(name: str, prepare: policy_losses.Prepare | None = None) -> Callable[[Any], Any]:
    """Return a decorator that makes a function the policy loss `name`; it is written as `lockstep.algorithms.policy_losses` says.

    The decorator raises ConfigError if the name is another function's, or if the function returns one number, as verl's do.
    """

    def decorate(function: Any) -> Any:
        if "loss_agg_mode" in input_names(f"policy loss {name!r}", function):
            raise ConfigError(
                f"policy loss {name!r} returns one number, which depends on how rows are cut into micro-batches; return the loss of "
                f"each token. Two lines change: `def {name}(old_log_prob, log_prob, advantages, response_mask, clip_ratio_low)`, "
                "without loss_agg_mode and with the numbers of `config` that it reads as arguments; and `return loss_mat, {}` in "
                "place of agg_loss(loss_mat, ...). actor.loss_agg_mode aggregates it (docs/from_verl.md)"
            )
        registered = policy_losses.register_policy_loss(name, prepare)(function)
        POLICY_LOSS_REGISTRY.setdefault(name, _policy_loss_fn(name))
        return registered

    return decorate


def get_policy_loss_fn(name: str) -> PolicyLossFn:
    """Return the policy loss `name` as a function (loss, metrics) of a batch. Raise ConfigError if there is none."""
    if name in POLICY_LOSS_REGISTRY:
        return POLICY_LOSS_REGISTRY[name]
    policy_losses.get_policy_loss(name)
    return _policy_loss_fn(name)


def compute_value_loss(
    vpreds: Tensor,
    returns: Tensor,
    values: Tensor,
    response_mask: Tensor,
    cliprange_value: float,
    loss_agg_mode: str = "token-mean",
    **counts: Any,
) -> tuple[Tensor, Tensor]:
    """Return the aggregated `value_losses.clipped_value_loss` and the share of clipped tokens. `counts` are those of `agg_loss`."""
    loss, metrics = clipped_value_loss(
        vpreds=vpreds, values=values, returns=returns, response_mask=response_mask, cliprange_value=cliprange_value
    )
    return agg_loss(loss, response_mask, loss_agg_mode, **counts), masked_mean(metrics["vf_clipfrac"], response_mask)


def compute_entropy_loss(logits: Tensor, response_mask: Tensor, loss_agg_mode: str = "token-mean") -> Tensor:
    entropy = torch.distributions.Categorical(logits=logits, validate_args=False).entropy()
    return agg_loss(entropy, response_mask, loss_agg_mode)


# -- KL


def kl_penalty(logprob: Tensor, ref_logprob: Tensor, kl_penalty: str) -> Tensor:
    return kl.kl_penalty(logprob, ref_logprob, kl_penalty)


def kl_penalty_forward(logprob: Tensor, ref_logprob: Tensor, kl_penalty: str) -> Tensor:
    return kl.kl_penalty(logprob, ref_logprob, kl_penalty.rstrip("+"))


def compute_rewards(token_level_scores: Tensor, old_log_prob: Tensor, ref_log_prob: Tensor, kl_ratio: float) -> Tensor:
    return token_level_scores - kl_ratio * kl.kl_penalty(old_log_prob, ref_log_prob, "kl")


def get_kl_controller(kl_ctrl: Any) -> kl.KLController:
    """Return the controller that a section like `algorithm.kl_ctrl` describes."""
    coefficient, target, horizon = (_value(kl_ctrl, name) or 0 for name in ("kl_coef", "target_kl", "horizon"))
    return kl.make_kl_controller(_value(kl_ctrl, "type"), coefficient, target, horizon)


# -- configurations


def _value(config: Any, name: str, default: Any = None) -> Any:
    """A value of a dataclass, an OmegaConf node or a mapping; the default if it has none."""
    if isinstance(config, Mapping):
        return config.get(name, default)
    return getattr(config, name, default)


def _loss_parameters(config: Any) -> dict[str, Any]:
    """The parameters of the losses from a section like `actor_rollout_ref.actor`, over our defaults."""
    if isinstance(config, ActorConfig):
        return config.loss_parameters
    parameters = ActorConfig(clip_ratio=_value(config, "clip_ratio", ActorConfig().clip_ratio)).loss_parameters
    for section in (config, _value(config, "policy_loss")):
        for name in parameters:
            value = _value(section, name)
            if value is not None:
                parameters[name] = value
    return parameters
