"""`reward.*` and `reward_model.*`: who judges a response."""

from dataclasses import dataclass, field
from typing import Any

from lockstep.config.check import at_least, one_of
from lockstep.config.engine import STRATEGIES, FSDPConfig, ModelConfig


@dataclass
class CustomRewardConfig:
    path: str | None = None
    """A Python file with a reward function of your own; null chooses the rule by data_source."""
    name: str = "compute_score"
    """The function in that file: (data_source, solution_str, ground_truth, extra_info) -> float or dict with 'score'."""
    reward_kwargs: dict[str, Any] = field(default_factory=dict)
    """More keyword arguments for it."""


@dataclass
class RewardConfig:
    custom_reward_function: CustomRewardConfig = field(default_factory=CustomRewardConfig)
    timeout_s: float = 300.0
    """Longest time that scoring one batch may take before the run stops."""

    def __post_init__(self) -> None:
        at_least("reward.timeout_s", self.timeout_s, 0.001)


@dataclass
class RewardModelConfig:
    enable: bool = False
    """Score training responses with a reward model (an AutoModelForSequenceClassification folder)."""
    strategy: str = "fsdp2"
    """Engine that runs it: fsdp or fsdp2."""
    model: ModelConfig = field(default_factory=ModelConfig)
    micro_batch_size_per_gpu: int | None = None
    """Rows scored at once on one device; null cuts by max_token_len_per_gpu."""
    max_token_len_per_gpu: int = 32768
    """Tokens scored at once on one device."""
    fsdp_config: FSDPConfig = field(default_factory=FSDPConfig)
    enable_resource_pool: bool = False
    """Put the reward model on processes of its own instead of the actor's."""
    n_gpus_per_node: int = 1
    """Devices (on a CPU machine: processes) a node in that pool."""
    nnodes: int = 1
    """Nodes in that pool."""

    def __post_init__(self) -> None:
        one_of("reward_model.strategy", self.strategy, STRATEGIES)
        for name in ("micro_batch_size_per_gpu", "max_token_len_per_gpu", "n_gpus_per_node", "nnodes"):
            at_least(f"reward_model.{name}", getattr(self, name), 1)
