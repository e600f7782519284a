"""The algorithms under verl's names and argument order, so that a recipe imports them by changing the package name.

Thin adapters over `lockstep.algorithms`, where the formulas are. Padded blocks [B, T] are read as B rows of T tokens; `index`, an array of
prompt ids, becomes the group of each row. Losses come aggregated over the batch that is given, as (loss, metrics), unless `config` has a
`global_batch_info` with the counts of a larger one. docs/algorithms/verl.md lists where the numbers differ from verl's, and why.
"""

import ast
import inspect
from collections.abc import Callable, Mapping
from enum import StrEnum
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.algorithms import advantages as estimators
from lockstep.algorithms import aggregation, blocks, kl, masked, policy_losses
from lockstep.algorithms.policy_losses import aggregated
from lockstep.algorithms.registry import registering
from lockstep.algorithms.rows import Rows
from lockstep.algorithms.value_losses import clipped_value_loss
from lockstep.compat.verl.names import read_rows
from lockstep.config.actor_rollout_ref import ActorConfig
from lockstep.config.algorithm import AlgorithmConfig

Advantages = tuple[Tensor, Tensor]
EstimatorFn = Callable[..., Advantages]
PolicyLossFn = Callable[..., tuple[Tensor, dict[str, float]]]

_ROW_MEAN = "seq-mean-token-mean"
_WITH_RETURNS = ("gae", "reinforce_plus_plus", "remax", "optimal_token_baseline", "tir_optimal_token_baseline")
"""The estimators whose returns are not their advantages."""

masked_mean, masked_whiten = masked.masked_mean, masked.masked_whiten
AdaptiveKLController, FixedKLController = kl.AdaptiveKLController, kl.FixedKLController
EXPRESSIONS: dict[str, Callable[..., Any]] = {
    "kl_penalty": lambda logprob, ref_logprob, kl_penalty: kl.kl_penalty(logprob, ref_logprob, kl_penalty),
    "kl_penalty_forward": lambda logprob, ref_logprob, kl_penalty: kl.kl_penalty(logprob, ref_logprob, kl_penalty.rstrip("+")),
    "get_kl_controller": lambda kl_ctrl: kl.make_kl_controller(
        _value(kl_ctrl, "type"), *(_value(kl_ctrl, name) or 0 for name in ("kl_coef", "target_kl", "horizon"))
    ),
    "compute_rewards": lambda token_level_scores, old_log_prob, ref_log_prob, kl_ratio: (
        token_level_scores - kl_ratio * kl.kl_penalty(old_log_prob, ref_log_prob, "kl")
    ),
    "compute_entropy_loss": lambda logits, response_mask, loss_agg_mode="token-mean": agg_loss(
        torch.distributions.Categorical(logits=logits, validate_args=False).entropy(), response_mask, loss_agg_mode
    ),
}
"""verl's name -> what it is, in one expression."""
globals().update(EXPRESSIONS)

ADV_ESTIMATOR_REGISTRY: dict[str, EstimatorFn] = {}
"""verl's name -> the function of estimators.txt, or one that was registered."""


def _estimator_fn(key: str, estimator: EstimatorFn, arguments: str, from_config: str) -> EstimatorFn:
    """verl's function for `key`, with verl's arguments. The names in `from_config` are those of `config`, where it has them."""
    signature = _signature(arguments)

    def compute(*args: Any, **kwargs: Any) -> Advantages:
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        inputs, config = dict(given.arguments), given.arguments.get("config")
        for name in from_config.split():
            inputs[name] = _value(config, name, inputs.get(name, getattr(AlgorithmConfig(), name)))
        if key == "gdpo":
            inputs |= _reward_parts(config, inputs)
        advantages, returns = blocks.estimate(estimator, inputs)
        advantages = advantages / inputs.get("f_norm", 1.0)
        return advantages, returns if key in _WITH_RETURNS else advantages

    compute.__name__ = compute.__qualname__ = f"compute_{key}"
    compute.__doc__ = f"The estimator {key!r} on padded blocks. Of its arguments it reads those that {estimator.__name__} has."
    compute.__signature__ = signature  # type: ignore[attr-defined]
    return ADV_ESTIMATOR_REGISTRY.setdefault(key, compute)


def _signature(arguments: str) -> inspect.Signature:
    """Of words like `index`, `epsilon=1e-6` and `**kwargs`."""
    parameters = []
    for word in arguments.split():
        name, _, default = word.partition("=")
        kind = inspect.Parameter.VAR_KEYWORD if word.startswith("**") else inspect.Parameter.POSITIONAL_OR_KEYWORD
        value = ast.literal_eval(default) if default else inspect.Parameter.empty
        parameters.append(inspect.Parameter(name.lstrip("*"), kind, default=value))
    return inspect.Signature(parameters)


def _reward_parts(config: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """The parts that `config.gdpo_reward_keys` names in `non_tensor_batch`, or the whole reward without keys, and their weights."""
    keys, weights = _value(config, "gdpo_reward_keys"), _value(config, "gdpo_reward_weights")
    parts = [masked.masked_sum(given["token_level_rewards"], given["response_mask"], dim=-1)]
    if keys:
        found = given["non_tensor_batch"] or {}
        parts = [torch.as_tensor(np.asarray(found[key], dtype=np.float64)).to(parts[0]) for key in keys]
    part_weights = torch.tensor(list(weights), dtype=torch.float64) if keys and weights else None
    return {"reward_parts": torch.stack(parts, dim=1), "reward_part_weights": part_weights}


for _row in read_rows("estimators.txt"):
    _function, _key, _ours, _arguments, _from_config = (part.strip() for part in _row.split("|"))
    globals()[_function] = _estimator_fn(_key, attrgetter(_ours)(estimators), _arguments, _from_config)
AdvantageEstimator = StrEnum("AdvantageEstimator", {key.upper(): key for key in ADV_ESTIMATOR_REGISTRY})  # type: ignore[misc]
"""verl's names of the estimators."""


def register_adv_est(name_or_enum: Any) -> Callable[[EstimatorFn], EstimatorFn]:
    """Make the decorated function an estimator of `algorithm.adv_estimator`; written for verl or for Lockstep, whose vocabulary
    (`lockstep.algorithms.advantages`) has verl's `index` and `config`. Raises ConfigError when the name is another function's."""
    name = getattr(name_or_enum, "value", name_or_enum)

    def decorate(function: EstimatorFn) -> EstimatorFn:
        registering("advantage estimator", ADV_ESTIMATOR_REGISTRY, name)(function)
        return estimators.register_adv_est(name)(function)

    return decorate


def get_adv_estimator_fn(name_or_enum: Any) -> EstimatorFn:
    """The function above of that name, or the estimator that was registered; ConfigError when there is none."""
    name = getattr(name_or_enum, "value", name_or_enum)
    return ADV_ESTIMATOR_REGISTRY[name] if name in ADV_ESTIMATOR_REGISTRY else estimators.get_adv_estimator(name)


def agg_loss(
    loss_mat: Tensor, loss_mask: Tensor, loss_agg_mode: str, dp_size: int = 1, batch_num_tokens: int | Tensor | None = None,
    global_batch_size: int | Tensor | None = None, loss_scale_factor: float | None = None,
) -> Tensor:  # fmt: skip
    """`aggregation.agg_loss` times `dp_size`, over the given counts, or those of this batch where none are given; seq-mean-token-sum-norm
    divides by the width of the mask unless `loss_scale_factor` is given."""
    if (stood_in := aggregated.stand_in(loss_mat)) is not None:
        return stood_in
    loss, mask, rows = loss_mat.flatten(), loss_mask.flatten(), Rows.of_padded(loss_mask)
    here = aggregation.Denominators.of(mask, rows)
    tokens = here.tokens if batch_num_tokens is None else int(batch_num_tokens)
    sequences = here.sequences if global_batch_size is None else int(global_batch_size)
    denominators = aggregation.Denominators(tokens, sequences)
    scale = float(loss_mask.shape[-1]) if loss_scale_factor is None else loss_scale_factor
    return aggregation.agg_loss(loss, mask, loss_agg_mode, denominators, rows, scale) * dp_size


def compute_policy_loss(
    old_log_prob: Tensor, log_prob: Tensor, advantages: Tensor, response_mask: Tensor, cliprange: float | None = None,
    cliprange_low: float | None = None, cliprange_high: float | None = None, clip_ratio_c: float = 3.0,
    loss_agg_mode: str = "token-mean",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The vanilla loss as (pg_loss, pg_clipfrac, ppo_kl, pg_clipfrac_lower). verl calls it deprecated."""
    low, high = (cliprange if bound is None else bound for bound in (cliprange_low, cliprange_high))
    if low is None or high is None:
        raise ValueError("compute_policy_loss needs cliprange, or both cliprange_low and cliprange_high")
    numbers = {"clip_ratio_low": low, "clip_ratio_high": high, "clip_ratio_c": clip_ratio_c}
    loss, means = blocks.policy_loss("vanilla", numbers, (old_log_prob, log_prob, advantages, response_mask))
    return agg_loss(loss, response_mask, loss_agg_mode), means["pg_clipfrac"], means["ppo_kl"], means["pg_clipfrac_lower"]


def _policy_loss_fn(name: str) -> PolicyLossFn:
    only_mode = _ROW_MEAN if name in ("gspo", "sapo", "geo_mean") else None

    def compute(
        old_log_prob: Tensor, log_prob: Tensor, advantages: Tensor, response_mask: Tensor,
        loss_agg_mode: str = _ROW_MEAN if name in ("gspo", "sapo") else "token-mean", config: Any = None,
        rollout_is_weights: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, float]]:  # fmt: skip
        loss, means = blocks.policy_loss(name, _loss_parameters(config), (old_log_prob, log_prob, advantages, response_mask))
        if rollout_is_weights is not None:
            loss = loss * masked.zero_outside(rollout_is_weights, response_mask)
        counts = _value(config, "global_batch_info") or {}
        total = agg_loss(loss, response_mask, only_mode or loss_agg_mode, **counts)
        return total, {f"actor/{key}": mean.item() for key, mean in means.items()}

    compute.__name__ = compute.__qualname__ = f"compute_policy_loss_{name}"
    fixed = f" Always aggregated as {only_mode}." if only_mode else ""
    compute.__doc__ = f"The policy loss {name!r} of a batch, as (loss, metrics). `config` is like actor_rollout_ref.actor.{fixed}"
    return compute


POLICY_LOSS_REGISTRY: dict[str, PolicyLossFn] = {name: _policy_loss_fn(name) for name in policy_losses.POLICY_LOSSES}
"""verl's name -> the policy loss as (loss, metrics) of a batch; `compute_policy_loss_{name}` is the same."""
globals().update({function.__name__: function for function in POLICY_LOSS_REGISTRY.values()})


def register_policy_loss(name: str, prepare: policy_losses.Prepare | None = None) -> Callable[[Any], Any]:
    """Make the decorated function the policy loss `name`; written for Lockstep, or for verl: (old_log_prob, log_prob, advantages,
    response_mask, loss_agg_mode, config, rollout_is_weights) -> (what `agg_loss` gave, metrics).

    Of the latter the losses per token that it gives to `agg_loss` are taken, which do not depend on micro-batches. Raises ConfigError
    when the name is another function's, or when a function written for verl does not end in `agg_loss`."""

    def decorate(function: Any) -> Any:
        ours, numbers = function, ActorConfig().loss_parameters
        if "loss_agg_mode" in inspect.signature(function).parameters:
            ours = aggregated.per_token(name, function, list(numbers))
            ours(**dict(zip(aggregated.BLOCKS, -torch.rand(4, 2, 3), strict=True)), **numbers)  # refused now, not in a step
        if name not in POLICY_LOSS_REGISTRY:
            policy_losses.register_policy_loss(name, prepare)(ours)
        registering("policy loss", POLICY_LOSS_REGISTRY, name)(function)
        return function

    return decorate


def get_policy_loss_fn(name: str) -> PolicyLossFn:
    """The function above of that name, or one like it for a loss that was registered; ConfigError when there is none."""
    found = POLICY_LOSS_REGISTRY.get(name)
    if found is not None and "loss_agg_mode" in inspect.signature(found).parameters:
        return found
    policy_losses.get_policy_loss(name)
    return _policy_loss_fn(name)


def compute_value_loss(
    vpreds: Tensor, returns: Tensor, values: Tensor, response_mask: Tensor, cliprange_value: float,
    loss_agg_mode: str = "token-mean", **counts: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`value_losses.clipped_value_loss`, aggregated with `agg_loss` and its `counts` (dp_size, batch_num_tokens, global_batch_size,
    loss_scale_factor), and the share of clipped tokens."""
    loss, metrics = clipped_value_loss(
        vpreds=vpreds, values=values, returns=returns, response_mask=response_mask, cliprange_value=cliprange_value
    )
    return agg_loss(loss, response_mask, loss_agg_mode, **counts), masked.masked_mean(metrics["vf_clipfrac"], response_mask)


def _value(config: Any, name: str, default: Any = None) -> Any:
    """A value of a dataclass, an OmegaConf node or a mapping; the default where it has none."""
    if isinstance(config, Mapping):
        return config.get(name, default)
    return getattr(config, name, default)


def _loss_parameters(config: Any) -> dict[str, Any]:
    """The parameters of the losses from a section like `actor_rollout_ref.actor`; our defaults where it says nothing."""
    if isinstance(config, ActorConfig):
        return config.loss_parameters
    found = ActorConfig(clip_ratio=_value(config, "clip_ratio", ActorConfig().clip_ratio)).loss_parameters
    sections = config, _value(config, "policy_loss")
    return found | {name: x for section in sections for name in found if (x := _value(section, name)) is not None}
