"""`critic.*`: the value model."""

from dataclasses import dataclass, field

from lockstep.config.check import TOKENS, at_least, auto_or, auto_or_at_least
from lockstep.config.engine import EngineChoice, ModelConfig, OptimConfig, check_learner


@dataclass
class CriticConfig(EngineChoice):
    """The value model of PPO."""

    enable: bool | None = None
    """Train a value model; null means: when the advantage estimator needs values."""
    model: ModelConfig = field(default_factory=ModelConfig)
    ppo_mini_batch_size: int | None = None
    """Prompts an optimizer step; null means the actor's."""
    ppo_micro_batch_size_per_gpu: int | None = None
    """Rows computed at once on one device; null cuts by ppo_max_token_len_per_gpu."""
    ppo_max_token_len_per_gpu: int | str = "auto"
    """Tokens computed at once on one device; auto as the actor's."""
    ppo_epochs: int | None = None
    """Passes over each batch; null means the actor's."""
    cliprange_value: float = 0.5
    """How far a value may move from its old one before its loss is clipped."""
    loss_agg_mode: str = "token-mean"
    """How token losses become one number; see the actor's."""
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(lr=1e-5))
    enable_resource_pool: bool = False
    """Put the critic on processes of its own instead of the actor's."""
    n_gpus_per_node: int = 1
    """Devices (on a CPU machine: processes) a node in that pool."""
    nnodes: int = 1
    """Nodes in that pool."""

    def __post_init__(self) -> None:
        self.check("critic")
        self.model.check("critic.model")
        self.optim.check("critic.optim")
        at_least(self, "critic", 0.0, "cliprange_value")
        at_least(self, "critic", 1, "ppo_mini_batch_size", "ppo_micro_batch_size_per_gpu", "ppo_epochs")
        auto_or_at_least(self, "critic", 1, "ppo_max_token_len_per_gpu")
        at_least(self, "critic", 1, "n_gpus_per_node", "nnodes")
        check_learner(self.model, self, "critic", "critic.model")

    @property
    def max_tokens(self) -> int:
        """Tokens computed at once, as they are where no plan has chosen them."""
        return int(auto_or(self.ppo_max_token_len_per_gpu, TOKENS))
