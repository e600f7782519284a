"""What the configuration says of an algorithm, resolved once at start: functions found, their numbers bound, decisions made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lockstep.algorithms import mismatch
from lockstep.algorithms.advantages import bind_estimator
from lockstep.algorithms.binding import Bound
from lockstep.algorithms.policy_losses import FLAT_WITHOUT_ADVANTAGE, bind_prepare, get_policy_loss
from lockstep.config.actor_rollout_ref import ActorConfig
from lockstep.config.algorithm import AlgorithmConfig, RolloutCorrectionConfig
from lockstep.utils.files import load_reference


@dataclass(frozen=True)
class Estimation:
    """How advantages are made of scores."""

    estimator: Bound
    kl_kind: str | None
    """Which estimate of the KL to the reference is taken off the scores; None takes nothing off."""
    reward_keys: Sequence[str] | None
    """The parts of the reward that the estimator reads."""
    turn_discounts: dict[str, float]
    """gamma and lam, where they are per turn of an episode."""
    of_values: tuple[float, float] | None = None
    """gamma and lam, where returns come from a row's own values and rewards with one number each (gae)."""

    @classmethod
    def of(cls, config: AlgorithmConfig) -> Estimation:
        """Raises ConfigError when there is no such estimator."""
        weights = config.gdpo_reward_weights
        parameters = {
            "config": config,
            "gamma": config.gamma,
            "lam": config.lam,
            "norm_adv_by_std_in_grpo": config.norm_adv_by_std_in_grpo,
            "reward_part_weights": torch.tensor(weights, dtype=torch.float64) if weights else None,
        }
        estimator = bind_estimator(load_reference(config.adv_estimator) or config.adv_estimator, parameters)
        per_turn = {"gamma": config.gamma, "lam": config.lam} if config.discount_unit == "turn" else {}
        of_values = (config.gamma, config.lam) if config.adv_estimator == "gae" and not per_turn else None
        kl_kind = config.kl_penalty if config.use_kl_in_reward else None
        return cls(estimator, kl_kind, config.gdpo_reward_keys, per_turn, of_values)


@dataclass(frozen=True)
class PolicyUpdate:
    """What an update of the policy wants of a mini-batch before it is cut."""

    prepare: Bound | None
    """Computes columns from the whole of it."""
    skips_rows: bool
    """Whether a row whose advantages are all 0 has no part in the gradient: neither entropy, nor KL, nor the load of a mixture's experts,
    nor the policy loss moves it."""

    @classmethod
    def of(cls, config: ActorConfig, balances: bool = False) -> PolicyUpdate:
        """`balances`: whether the loss has a load-balance loss in it. Raises ConfigError when there is no such loss."""
        mode = config.policy_loss.loss_mode
        loss = load_reference(mode) or get_policy_loss(mode)
        is_flat = loss in FLAT_WITHOUT_ADVANTAGE and not (config.entropy_coeff or config.use_kl_loss or balances)
        return cls(bind_prepare(loss, config.loss_parameters), is_flat)


def read_correction(config: RolloutCorrectionConfig) -> mismatch.Correction | None:
    """The section as the algorithms take it; None where it asks for nothing. Raises ConfigError when it cannot work."""
    correction = mismatch.make_correction(
        config.rollout_is,
        config.rollout_is_threshold,
        config.rollout_is_batch_normalize,
        config.rollout_rs,
        config.rollout_rs_threshold,
    )
    return correction if correction.is_on else None


def reads_rewards(algorithm: AlgorithmConfig) -> bool:
    """Whether rewards decide what is learned, or which rows are."""
    columns = Estimation.of(algorithm).estimator.columns
    return algorithm.filter_groups.enable or any(
        name in columns for name in ("token_level_rewards", "reward_baselines", "reward_parts")
    )


def reads_old_log_probs(algorithm: AlgorithmConfig, actor: ActorConfig) -> bool:
    """Whether old log-probs are read before the update: by the correction, the KL in the reward, the estimator, or what the policy loss
    wants computed from a whole mini-batch. Otherwise a batch's only update, whose forward pass computes them, can do without a pass."""
    prepare = PolicyUpdate.of(actor).prepare
    return (
        read_correction(algorithm.rollout_correction) is not None
        or algorithm.use_kl_in_reward
        or "old_log_probs" in Estimation.of(algorithm).estimator.columns
        or (prepare is not None and "old_log_prob" in prepare.columns)
    )
