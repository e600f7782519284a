"""`algorithm.*`: how rewards become advantages."""

from dataclasses import dataclass, field
from typing import Any

from lockstep.config.check import above, absolute_reference, at_least, in_range, one_of
from lockstep.errors import ConfigError


@dataclass
class KLControlConfig:
    """The weight of the KL in the reward."""

    type: str = "fixed"
    """fixed keeps kl_coef; adaptive steers it towards target_kl."""
    kl_coef: float = 0.001
    """Weight of the KL penalty (for adaptive: at the start)."""
    horizon: int = 10000
    """adaptive: rows over which the weight reacts."""
    target_kl: float = 0.1
    """adaptive: the KL to hold."""

    def __post_init__(self) -> None:
        one_of("algorithm.kl_ctrl.type", self.type, ("fixed", "adaptive"))
        at_least(self, "algorithm.kl_ctrl", 1, "horizon")
        at_least(self, "algorithm.kl_ctrl", 0.0, "kl_coef")
        above(self, "algorithm.kl_ctrl", 0.0, "target_kl")


@dataclass
class FilterGroupsConfig:
    """Dynamic sampling (DAPO)."""

    enable: bool = False
    """Dynamic sampling, as in DAPO: drop prompts whose responses all have the same score, and generate more until the batch is full."""
    metric: str = "score"
    """What must differ: score (what the judges gave), seq_reward (with the overlong penalty), or a key that a reward function returned."""
    max_num_gen_batches: int = 10
    """Batches of prompts generated at most for one step; 0: those of one epoch. The step goes on with what there is then."""

    def __post_init__(self) -> None:
        at_least(self, "algorithm.filter_groups", 0, "max_num_gen_batches")


@dataclass
class RolloutCorrectionConfig:
    """What is done about a sampler whose probabilities are not the trainer's; see docs/algorithms/mismatch.md."""

    rollout_is: str | None = None
    """Weigh the policy loss by trainer / sampler probability: of each token (token) or of the whole response (sequence); null: no."""
    rollout_is_threshold: Any = 2.0
    """Weights above it are cut to it; a string "0.5_5.0" sets weights outside that band to 0 instead (IcePop)."""
    rollout_is_batch_normalize: bool = False
    """Divide the weights by their mean over the batch."""
    rollout_rs: str | None = None
    """Take tokens, responses or groups out of the batch: token_, seq_sum_, seq_mean_, seq_max_ or group_ with k1, k2 or k3; several
    with commas."""
    rollout_rs_threshold: Any = None
    """One threshold for each kind: for k1 the ratios that stay, "0.5_2.0" or 2.0; for k2 and k3 the largest divergence."""
    bypass_mode: bool = False
    """Always take the sampler's log-probs as the old ones, without recomputing them: the policy loss alone corrects."""

    def __post_init__(self) -> None:
        if self.bypass_mode and (self.rollout_is is not None or self.rollout_rs is not None):
            raise ConfigError(
                "algorithm.rollout_correction.bypass_mode=true makes the sampler's log-probs the old ones, so rollout_is and rollout_rs "
                "would compare them with themselves; leave them out, or set bypass_mode=false",
                key="algorithm.rollout_correction.bypass_mode",
            )


@dataclass
class AlgorithmConfig:
    """How rewards become advantages."""

    adv_estimator: str = "gae"
    """How advantages are estimated: gae (needs a critic), grpo, grpo_passk, rloo, opo, gpg, reinforce_plus_plus,
    reinforce_plus_plus_baseline, gdpo, remax, optimal_token_baseline, distill (learn from actor_rollout_ref.ref.model.path), or
    path.py:function of your own; see docs/algorithms/."""
    gamma: float = 1.0
    """Discount per token, or per turn."""
    lam: float = 1.0
    """GAE's lambda, per token or per turn."""
    discount_unit: str = "token"
    """What gamma and lam count: token, or turn (of episodes: within a turn nothing is discounted)."""
    norm_adv_by_std_in_grpo: bool = True
    """grpo, grpo_passk, gdpo: divide by the group's standard deviation; false is Dr.GRPO."""
    gdpo_reward_keys: list[str] | None = None
    """gdpo: the parts of the reward to balance, by name: judges of reward.weights, keys that a reward function returned, and
    overlong_penalty where reward.overlong_buffer is on."""
    gdpo_reward_weights: list[float] | None = None
    """gdpo: their weights; null weighs all alike."""
    use_kl_in_reward: bool = False
    """Subtract the KL to the reference policy from the reward."""
    kl_penalty: str = "kl"
    """Its estimator: kl (k1), abs, mse (k2), low_var_kl (k3)."""
    kl_ctrl: KLControlConfig = field(default_factory=KLControlConfig)
    filter_groups: FilterGroupsConfig = field(default_factory=FilterGroupsConfig)
    rollout_correction: RolloutCorrectionConfig = field(default_factory=RolloutCorrectionConfig)

    def __post_init__(self) -> None:
        in_range(self, "algorithm", 0.0, 1.0, "gamma", "lam")
        one_of("algorithm.discount_unit", self.discount_unit, ("token", "turn"))
        self.adv_estimator = absolute_reference(self.adv_estimator)
        keys = self.gdpo_reward_keys
        weights = self.gdpo_reward_weights
        if weights is not None and len(weights) != len(keys or ()):
            raise ConfigError(
                f"algorithm.gdpo_reward_weights={weights} needs one weight for each of algorithm.gdpo_reward_keys={keys}",
                key="algorithm.gdpo_reward_weights",
            )
