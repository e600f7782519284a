"""`reward.*` and `reward_model.*`: who judges a response."""

from dataclasses import dataclass, field
from typing import Any

from lockstep.config.check import SCORED_TOKENS, at_home, at_least, auto_or, auto_or_at_least, in_range
from lockstep.config.engine import EngineChoice, ModelConfig
from lockstep.errors import ConfigError


@dataclass
class CustomRewardConfig:
    """A reward function of your own."""

    path: str | None = None
    """A Python file with a reward function of your own; null chooses the rule by data_source."""
    name: str = "compute_score"
    """The function in that file: (data_source, solution_str, ground_truth, extra_info) -> float or dict with 'score'."""
    reward_kwargs: dict[str, Any] = field(default_factory=dict)
    """More keyword arguments for it."""

    def __post_init__(self) -> None:
        at_home(self, "path")
        if not self.path and self.name != CustomRewardConfig.name:
            key = "reward.custom_reward_function"
            raise ConfigError(
                f"{key}.name={self.name}, but {key}.path is not set; set it to the file, or leave {key}.name out", key=f"{key}.name"
            )


@dataclass
class SandboxConfig:
    """Where the programs of code rewards run."""

    url: str | None = None
    """A SandboxFusion server that runs the programs of code rewards; null runs them on the driver's machine, isolated by bubblewrap."""
    max_concurrent: int | None = None
    """Programs at once; null: one a core on this machine, 64 on a server."""
    wall_s: float = 10.0
    """Longest time one program may run; one test case of a code reward."""
    memory_limit_mb: int = 1024
    """Memory that one program and all it starts may use."""
    accept_weak_isolation: bool = False
    """Run programs without bubblewrap where it is not installed. They can then read files and reach the network."""

    def __post_init__(self) -> None:
        at_least(self, "reward.sandbox", 1, "max_concurrent")
        at_least(self, "reward.sandbox", 0.1, "wall_s")
        at_least(self, "reward.sandbox", 16, "memory_limit_mb")


@dataclass
class OverlongConfig:
    """A penalty for responses near the limit of length (DAPO)."""

    enable: bool = False
    """Lower the reward of responses that come close to data.max_response_length, as DAPO does."""
    len: int | None = None
    """Tokens before the limit over which the penalty grows from 0 to penalty_factor; null: a fifth of data.max_response_length."""
    penalty_factor: float = 1.0
    """The penalty at the limit."""

    def __post_init__(self) -> None:
        at_least(self, "reward.overlong_buffer", 1, "len")
        at_least(self, "reward.overlong_buffer", 0.0, "penalty_factor")

    def num_tokens(self, max_response_length: int) -> int:
        """`len`, or what it is where it is not set."""
        return max(1, max_response_length // 5) if self.len is None else self.len


@dataclass
class JudgeConfig:
    """Who judges a response that was sampled."""

    custom_reward_function: CustomRewardConfig = field(default_factory=CustomRewardConfig)
    rules: dict[str, str] = field(default_factory=dict)
    """Rules of your own: data_source -> file.py:function, with arguments (solution_str, ground_truth)."""
    functions: dict[str, str] = field(default_factory=dict)
    """More judges: name -> file.py:function, for use in weights."""
    weights: dict[str, dict[str, float]] = field(default_factory=dict)
    """Who judges: data_source, or * for every other -> judge (rule, model, sandbox, or a name in functions) -> weight."""
    timeout_s: float = 30.0
    """Longest time that one call of a reward function may take."""
    retries: int = 0
    """How often a call of a reward function that raised, was late or lost its process is made again: for judges over a network. Each call
    has the deadline timeout_s; before the next are 1, 2, 4, ... s, at most 30."""
    num_workers: int | None = None
    """Processes that call reward functions; null: one a core, at most 8."""
    max_memory_mb: int | None = 8192
    """Memory of each of these processes, and of each process that it starts; null: no limit."""
    max_failure_rate: float = 0.1
    """Largest share of a batch whose reward may be missing (a function raised, hung or returned no number) before the run stops. In a
    validation, of perhaps few rows, the run stops only when so many are missing that chance does not explain them at this rate, or all."""
    sandbox: SandboxConfig = field(default_factory=SandboxConfig)

    def __post_init__(self) -> None:
        at_least(self, "reward", 0.001, "timeout_s")
        at_least(self, "reward", 0, "retries")
        at_least(self, "reward", 1, "num_workers")
        at_least(self, "reward", 256, "max_memory_mb")
        in_range(self, "reward", 0.0, 1.0, "max_failure_rate")


@dataclass
class RewardConfig(JudgeConfig):
    """Who judges a response, and within which limits."""

    overlong_buffer: OverlongConfig = field(default_factory=OverlongConfig)


@dataclass
class RewardModelConfig(EngineChoice):
    """A reward model that scores training responses."""

    enable: bool = False
    """Score training responses with a reward model (an AutoModelForSequenceClassification folder)."""
    model: ModelConfig = field(default_factory=ModelConfig)
    micro_batch_size_per_gpu: int | None = None
    """Rows scored at once on one device; null cuts by max_token_len_per_gpu."""
    max_token_len_per_gpu: int | str = "auto"
    """Tokens scored at once on one device; auto: 32,768, or one row."""
    enable_resource_pool: bool = False
    """Put the reward model on processes of its own instead of the actor's."""
    n_gpus_per_node: int = 1
    """Devices (on a CPU machine: processes) a node in that pool."""
    nnodes: int = 1
    """Nodes in that pool."""

    def __post_init__(self) -> None:
        self.check("reward_model")
        self.model.check("reward_model.model")
        if self.model.adapts:
            name = "lora_rank" if self.model.lora_rank else "lora_adapter_path"
            raise ConfigError(
                f"reward_model.model.{name} is for a model that learns; leave it out, and name a folder with the adapter merged in "
                "reward_model.model.path where there is one, such as a checkpoint of lockstep reward-model",
                key=f"reward_model.model.{name}",
            )
        at_least(self, "reward_model", 1, "micro_batch_size_per_gpu", "n_gpus_per_node", "nnodes")
        auto_or_at_least(self, "reward_model", 1, "max_token_len_per_gpu")

    @property
    def max_tokens(self) -> int:
        """Tokens scored at once, as they are where no plan has chosen them."""
        return int(auto_or(self.max_token_len_per_gpu, SCORED_TOKENS))
