"""The algorithm of a configuration, bound once at start: functions found, their numbers filled in, decisions made."""

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
    """How advantages are computed from scores."""

    estimator: Bound
    kl_kind: str | None
    """The estimate of the KL to the reference that is subtracted from scores; None subtracts nothing."""
    reward_keys: Sequence[str] | None
    """The parts of the reward that the estimator reads."""
    turn_discounts: dict[str, float]
    """gamma and lam, if they are per turn of an episode."""
    of_values: tuple[float, float] | None = None
    """gamma and lam, if returns follow from a row's own values and rewards with one number each (gae)."""

    @classmethod
    def of(cls, config: AlgorithmConfig) -> Estimation:
        """Raise ConfigError for an unknown estimator."""
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
    """What an update of the policy needs of a mini-batch before it is cut."""

    prepare: Bound | None
    """Computes columns from the whole mini-batch."""
    skips_rows: bool
    """Whether a row whose advantages are all 0 has no part in the gradient: neither entropy, nor KL, nor the load of a mixture's experts,
    nor the policy loss moves it."""

    @classmethod
    def of(cls, config: ActorConfig, balances: bool = False) -> PolicyUpdate:
        """`balances`: the loss contains a load-balance loss. Raise ConfigError for an unknown loss."""
        mode = config.policy_loss.loss_mode
        loss = load_reference(mode) or get_policy_loss(mode)
        is_flat = loss in FLAT_WITHOUT_ADVANTAGE and not (config.entropy_coeff or config.use_kl_loss or balances)
        return cls(bind_prepare(loss, config.loss_parameters), is_flat)


def correction_of(config: RolloutCorrectionConfig) -> mismatch.Correction | None:
    """Return the correction that the section describes, None if it is off. Raise ConfigError if it cannot work."""
    correction = mismatch.make_correction(
        config.rollout_is,
        config.rollout_is_threshold,
        config.rollout_is_batch_normalize,
        config.rollout_rs,
        config.rollout_rs_threshold,
    )
    return correction if correction.is_on else None


def reads_rewards(algorithm: AlgorithmConfig) -> bool:
    """Return whether rewards decide what is learned, or from which rows."""
    columns = Estimation.of(algorithm).estimator.columns
    reward_columns = ("token_level_rewards", "reward_baselines", "reward_parts")
    return algorithm.filter_groups.enable or any(name in columns for name in reward_columns)


def reads_old_log_probs(algorithm: AlgorithmConfig, actor: ActorConfig) -> bool:
    """Return whether old log-probs are read before the update: by the correction, the KL in the reward, the estimator, or the part of the
    policy loss that is computed from a whole mini-batch. If not, a batch's only update can compute them in its own forward pass."""
    prepare = PolicyUpdate.of(actor).prepare
    return (
        correction_of(algorithm.rollout_correction) is not None
        or algorithm.use_kl_in_reward
        or "old_log_probs" in Estimation.of(algorithm).estimator.columns
        or (prepare is not None and "old_log_prob" in prepare.columns)
    )
