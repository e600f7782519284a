"""`algorithm.*`: how rewards become advantages."""

from dataclasses import dataclass, field

from lockstep.config.check import at_least, in_range, one_of


@dataclass
class KLControlConfig:
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
        at_least("algorithm.kl_ctrl.horizon", self.horizon, 1)


@dataclass
class FilterGroupsConfig:
    enable: bool = False
    """Dynamic sampling, as in DAPO: drop prompts whose responses all have the same score, and generate more until the batch is full."""
    metric: str = "score"
    """What must differ: score (what the judges gave), seq_reward (with the overlong penalty), or a key that a reward function returned."""
    max_num_gen_batches: int = 10
    """Batches of prompts generated at most for one step; 0: no limit. The step goes on with what there is then."""

    def __post_init__(self) -> None:
        at_least("algorithm.filter_groups.max_num_gen_batches", self.max_num_gen_batches, 0)


@dataclass
class AlgorithmConfig:
    adv_estimator: str = "gae"
    """How advantages are estimated: gae (needs a critic), grpo, grpo_passk, rloo, opo, gpg, reinforce_plus_plus,
    reinforce_plus_plus_baseline; see docs/algorithms.md."""
    gamma: float = 1.0
    """Discount a token."""
    lam: float = 1.0
    """GAE's lambda."""
    norm_adv_by_std_in_grpo: bool = True
    """grpo, grpo_passk: divide by the group's standard deviation; false is Dr.GRPO."""
    use_kl_in_reward: bool = False
    """Subtract the KL to the reference policy from the reward."""
    kl_penalty: str = "kl"
    """Its estimator: kl, abs, mse, low_var_kl."""
    kl_ctrl: KLControlConfig = field(default_factory=KLControlConfig)
    gdpo_reward_keys: list[str] = field(default_factory=list)
    """gdpo: the reward parts, by name: judges of reward.weights, or keys that a reward function returned."""
    filter_groups: FilterGroupsConfig = field(default_factory=FilterGroupsConfig)

    def __post_init__(self) -> None:
        in_range("algorithm.gamma", self.gamma, 0.0, 1.0)
        in_range("algorithm.lam", self.lam, 0.0, 1.0)
