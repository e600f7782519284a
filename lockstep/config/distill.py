"""`lockstep distill`: learning from a teacher."""

from dataclasses import dataclass, field, replace
from typing import ClassVar

from lockstep.config.actor_rollout_ref import ActorRolloutRefConfig, RefConfig, RefModelConfig
from lockstep.config.check import above, at_home, at_least, auto_or_bool, in_range
from lockstep.config.engine import ModelConfig, OptimConfig
from lockstep.config.sampling import SamplingConfig
from lockstep.config.sft import SFTConfig
from lockstep.config.stage import stage_optim
from lockstep.errors import ConfigError

_DIVIDED = ("pipeline_model_parallel_size", "pipeline_parallel_size", "ulysses_sequence_parallel_size", "ulysses_parallel_size")
"""Keys of the engines' sections that keep a rank from having whole rows at the end of a model."""


@dataclass
class TeacherConfig:
    """`teacher.*`: the model that is learned from."""

    path: str | None = None
    """The teacher: a Hugging Face model folder with the tokenizer of model.path."""
    param_offload: bool | str = "auto"
    """Keep its weights in host memory while responses are generated. auto: when the models on a GPU do not fit otherwise."""

    def __post_init__(self) -> None:
        at_home(self, "path")
        auto_or_bool(self, "teacher", "param_offload")


@dataclass
class DistillationConfig:
    """`distill.*`: what is compared, and on which rows."""

    beta: float = 0.5
    """The divergence: 0 the forward KL (teacher to student), 1 the reverse one, between them the generalised Jensen-Shannon divergence."""
    temperature: float = 1.0
    """Divides the logits of both models before they are compared."""
    top_k: int | None = None
    """Compare the teacher's k most likely tokens and all others as one; null compares the whole vocabulary."""
    on_policy_share: float = 0.5
    """The share of rows whose answers the student samples itself; the others are those of the files."""
    sampling_temperature: float = 1.0
    """Divides the student's logits when it samples."""
    max_response_length: int = 512
    """The longest sampled answer, in tokens."""

    def __post_init__(self) -> None:
        in_range(self, "distill", 0.0, 1.0, "beta", "on_policy_share")
        above(self, "distill", 0.0, "temperature", "sampling_temperature")
        at_least(self, "distill", 1, "top_k", "max_response_length")


@dataclass
class DistillConfig(SFTConfig):
    """Everything a run of distillation needs to know."""

    command: ClassVar[str] = "lockstep distill"
    about: ClassVar[str] = "Learn from a teacher. It needs model.path, teacher.path and data.train_files."

    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    distill: DistillationConfig = field(default_factory=DistillationConfig)
    optim: OptimConfig = field(default_factory=lambda: stage_optim(2e-5))

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.teacher.path:
            raise ConfigError("teacher.path is empty; name the Hugging Face model folder that is learned from", key="teacher.path")
        self._check_engine()
        self.check_longest("data.max_length + distill.max_response_length", self.longest)

    @property
    def longest(self) -> int:
        """Tokens of the longest row: a sampled answer may follow the longest prompt."""
        return self.data.max_length + (self.distill.max_response_length if self.distill.on_policy_share else 0)

    @property
    def models(self) -> list[ModelConfig]:
        """The student and the teacher."""
        return [self.model, self.policy().reference_model]

    def policy(self, sampling: SamplingConfig | None = None) -> ActorRolloutRefConfig:
        ref = RefConfig(model=RefModelConfig(self.teacher.path), param_offload=self.teacher.param_offload)
        return replace(super().policy(sampling), ref=ref)

    def _check_engine(self) -> None:
        strategy = self.engine.strategy
        section = self.engine.engine
        where = strategy if hasattr(self.engine, strategy) else "fsdp_config"
        for key in _DIVIDED:
            if getattr(section, key, 1) > 1:
                raise ConfigError(
                    f"engine.{where}.{key}={getattr(section, key)}: the two models are compared where one rank has the whole rows at the "
                    "end of both; set it to 1, or use lockstep ppo algorithm.adv_estimator=distill",
                    key=f"engine.{where}.{key}",
                )
