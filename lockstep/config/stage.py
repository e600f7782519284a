"""What the recipes around RL (sft, ...) have in common: the model that learns, its engine, its optimizer, the run."""

from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar

from lockstep.config.actor_rollout_ref import ActorConfig, ActorRolloutRefConfig, PolicyKeys, RolloutConfig, ValidationSampling
from lockstep.config.check import all_or_at_least_one, at_home, at_least, auto_or_at_least, file_names, one_of
from lockstep.config.engine import STRATEGIES, EngineChoice, ModelConfig, OptimConfig, check_learner
from lockstep.config.identity import default_name
from lockstep.config.sampling import SamplingConfig
from lockstep.config.trainer import RayConfig, RunConfig
from lockstep.errors import ConfigError


@dataclass
class LearnerConfig(EngineChoice):
    """`engine.*`: where the model is trained."""

    max_token_len_per_gpu: int | str = "auto"
    """Tokens computed at once on one device; auto: as many as help, while nothing more is offloaded or recomputed for them. It never
    changes the result."""
    micro_batch_size_per_gpu: int | None = None
    """Rows computed at once on one device; null cuts by max_token_len_per_gpu. It never changes the result."""

    def __post_init__(self) -> None:
        one_of("engine.strategy", self.strategy, STRATEGIES)
        self.check("engine")
        at_least(self, "engine", 1, "micro_batch_size_per_gpu")
        auto_or_at_least(self, "engine", 1, "max_token_len_per_gpu")


@dataclass
class FilesConfig:
    """`data.*`: rows in files, and how they become steps."""

    given: ClassVar[frozenset[str] | None] = None
    """See DataConfig.given."""

    train_files: Any = None
    """Rows to train on: a file (parquet, json, jsonl), a folder of such files, a pattern such as data/*.parquet, or a list of these."""
    val_files: Any = None
    """Rows to validate on, in the same forms; null means none."""
    max_length: int = 2048
    """The longest row, in tokens."""
    truncation: str = "error"
    """What happens to a longer row: error, left (keep the end), right (keep the start), middle (keep both ends)."""
    filter_overlong_rows: bool = False
    """Leave out rows that do not fit into max_length, cut by truncation where that is set, and say how many."""
    train_batch_size: int = 64
    """Rows a step, which is one update."""
    shuffle: bool = True
    """Visit the training rows in a new order each epoch."""
    seed: int | None = None
    """Seed of that order; null uses trainer.seed."""
    train_max_samples: int = -1
    """Use at most this many training rows; -1 uses all."""
    val_max_samples: int = -1
    """Use at most this many validation rows; -1 uses all."""

    def __post_init__(self) -> None:
        at_home(self, "train_files", "val_files")
        file_names("data.train_files", self.train_files)
        file_names("data.val_files", self.val_files)
        all_or_at_least_one(self, "data", "train_max_samples", "val_max_samples")
        one_of("data.truncation", self.truncation, ("error", "left", "right", "middle"))
        at_least(self, "data", 2, "max_length")
        at_least(self, "data", 1, "train_batch_size")


STAGE_KEYS = PolicyKeys(
    name="train",
    engine="engine",
    tokens="engine.max_token_len_per_gpu",
    model="model",
    reference_tokens="engine.max_token_len_per_gpu",
    reference_offload="engine.fsdp_config.param_offload",
    length="data.max_length",
    rollout=None,
)
"""What the workers' messages call these sections."""


def stage_optim(lr: float) -> OptimConfig:
    """The optimizer of a recipe: a short warm-up, then a cosine to a tenth."""
    return OptimConfig(lr=lr, lr_scheduler_type="cosine", lr_warmup_steps_ratio=0.03, min_lr_ratio=0.1)


@dataclass
class StageConfig:
    """The sections that these recipes share."""

    command: ClassVar[str]
    flags: ClassVar[str] = ""

    model: ModelConfig = field(default_factory=ModelConfig)
    engine: LearnerConfig = field(default_factory=LearnerConfig)
    optim: OptimConfig = field(default_factory=lambda: stage_optim(1e-5))
    trainer: RunConfig = field(default_factory=RunConfig)
    ray_kwargs: RayConfig = field(default_factory=RayConfig)

    def __post_init__(self) -> None:
        if not self.model.path:
            raise ConfigError("model.path is empty; name a Hugging Face model folder", key="model.path")
        if self.trainer.experiment_name is None:
            name = default_name(self, self.command.removeprefix("lockstep "), self.model.path)
            self.trainer = replace(self.trainer, experiment_name=name)
        self.model.check("model")
        self.optim.check("optim")
        check_learner(self.model, self.engine, "engine", "model")
        if self.trainer.worker_group == "local" and self.needs_ray:
            raise ConfigError(
                "trainer.worker_group=local runs one process, but the run asks for more (trainer.n_gpus_per_node="
                f"{self.trainer.n_gpus_per_node}, trainer.nnodes={self.trainer.nnodes}); use trainer.worker_group=ray, or one process",
                key="trainer.worker_group",
            )

    @property
    def needs_ray(self) -> bool:
        """Whether the run has more than one process, which only Ray starts."""
        return self.trainer.n_gpus_per_node * self.trainer.nnodes > 1

    @property
    def models(self) -> list[ModelConfig]:
        """The models that read whole rows."""
        return [self.model]

    def check_longest(self, key: str, longest: int) -> None:
        """Raise ConfigError unless a micro-batch holds a row of `longest` tokens, the value of `key`."""
        budget = self.engine.max_token_len_per_gpu
        ranks = self.engine.token_ranks
        if self.engine.micro_batch_size_per_gpu is None and not isinstance(budget, str) and budget * ranks < longest:
            raise ConfigError(
                f"engine.max_token_len_per_gpu={budget} tokens cannot hold one row of {key}={longest} tokens; "
                f"raise engine.max_token_len_per_gpu to at least {-(-longest // ranks)}",
                key="engine.max_token_len_per_gpu",
            )

    def check_pairs(self, max_length: int) -> None:
        """Raise ConfigError unless a micro-batch holds the two rows of a pair, which are computed together."""
        self.check_longest("2 * data.max_length", 2 * max_length)
        if self.engine.micro_batch_size_per_gpu == 1:
            raise ConfigError(
                "engine.micro_batch_size_per_gpu=1 holds one row, but the two rows of a pair are computed together; set 2",
                key="engine.micro_batch_size_per_gpu",
            )

    def policy(self, sampling: SamplingConfig | None = None) -> ActorRolloutRefConfig:
        """The section that the workers of a policy take."""
        engine = self.engine
        actor = ActorConfig(
            strategy=engine.strategy,
            fsdp_config=engine.fsdp_config,
            megatron=engine.megatron,
            torchtitan=engine.torchtitan,
            veomni=engine.veomni,
            ppo_max_token_len_per_gpu=engine.max_token_len_per_gpu,
            ppo_micro_batch_size_per_gpu=engine.micro_batch_size_per_gpu,
            optim=self.optim,
        )
        rollout = RolloutConfig()
        if sampling is not None:
            drawn = {item.name: getattr(sampling, item.name) for item in fields(ValidationSampling)}
            rollout = RolloutConfig(val_kwargs=ValidationSampling(**drawn))
        return ActorRolloutRefConfig(model=self.model, actor=actor, rollout=rollout)
