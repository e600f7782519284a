"""What every trained or frozen model needs: where it comes from, how it is sharded, how it is optimised."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep.config.check import at_home, at_least, auto_or_bool, in_range, one_of
from lockstep.errors import ConfigError

STRATEGIES = ("fsdp", "fsdp2", "megatron", "torchtitan", "veomni")
"""Training engines that can be named in actor.strategy, critic.strategy and reward_model.strategy."""

SCHEDULES = ("constant", "cosine", "linear", "wsd")

DTYPES = ("auto", "float32", "bfloat16")

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
_KEPT = ("r", "lora_alpha", "use_rslora", "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern")
"""Keys of an adapter folder that choose its layers and sizes."""
_ALLOWED: dict[str, tuple[Any, ...]] = {
    "bias": ("none",), "init_lora_weights": (True, False, "gaussian", "orthogonal"),
}  # fmt: skip
"""Options with a word for what is plain LoRA; other ways to initialise change the model's own weights."""
_OF_NO_EFFECT = {
    "auto_mapping", "base_model_name_or_path", "fan_in_fan_out", "inference_mode", "lora_dropout", "megatron_core", "peft_type",
    "peft_version", "qalora_group_size", "revision", "task_type",
}  # fmt: skip
"""Keys of an adapter folder that change nothing here: its origin, options that are off, and dropout."""


@dataclass
class ModelConfig:
    """A model: its folder, adapters (LoRA), what is recomputed."""

    path: str | None = None
    """A Hugging Face model folder or hub id, a .gguf file, or smollm2-135m (a small real model without a hub; see docs/generation.md).
    For the critic, null means the actor's model with a new value head."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model. Only for folders you trust."""
    override_config: dict[str, Any] = field(default_factory=dict)
    """Entries of the model's config.json to replace."""
    enable_gradient_checkpointing: bool = True
    """Recompute activations in the backward pass instead of keeping them all, as far as `recompute` says; false keeps all."""
    recompute: str = "auto"
    """full (every layer: least memory, about a third more time), selective (the MLPs), or auto: the least with which a micro-batch fits."""

    router_aux_loss_coef: float = 0.0
    """Mixtures of experts: the weight of the load-balance loss (fsdp and fsdp2); see docs/training.md."""
    lora_rank: int = 0
    """Train adapters of this rank beside the model's linear layers instead of the model (LoRA; fsdp and fsdp2). 0: train the model."""
    lora_alpha: int = 16
    """LoRA: adapters are scaled by lora_alpha / lora_rank; at least 1, since 0 would learn nothing."""
    target_modules: Any = "all-linear"
    """LoRA: which layers get an adapter: all-linear (all but the output layer; of mixtures, attention and shared experts), or a list of
    names such as [q_proj,v_proj]."""
    lora_adapter_path: str | None = None
    """LoRA: start from the adapter in this folder, which peft or a checkpoint (its `adapter`) wrote; rank, alpha and layers are the
    folder's, and lora_rank may stay 0. The reference is the model without it."""

    def __post_init__(self) -> None:
        at_home(self, "path", "lora_adapter_path")

    def check(self, prefix: str) -> None:
        """Raise ConfigError, naming the key after `prefix`, for a value that cannot work. So do the other sections that exist twice."""
        one_of(f"{prefix}.recompute", self.recompute, ("auto", "selective", "full"))
        at_least(self, prefix, 0, "lora_rank")
        at_least(self, prefix, 1, "lora_alpha")
        at_least(self, prefix, 0.0, "router_aux_loss_coef")
        if self.lora_adapter_path is not None:
            self._check_adapter(prefix, self.lora_adapter_path)
        else:
            self._check_layers(prefix)

    def _check_layers(self, prefix: str) -> None:
        """Layers of adapters are named in a list, and not where the whole model would learn. (`lora_alpha` may be: scripts set it with any
        rank.)"""
        names = self.target_modules
        if names != "all-linear" and not (isinstance(names, list) and names and all(isinstance(name, str) for name in names)):
            shown = "null" if names is None else names
            raise ConfigError(
                f"{prefix}.target_modules={shown} must be all-linear or a list of names such as [q_proj,v_proj]",
                key=f"{prefix}.target_modules",
            )
        if names != "all-linear" and not self.adapts:
            raise ConfigError(
                f"{prefix}.target_modules={names} are layers of adapters, and {prefix}.lora_rank=0 trains the whole model; set "
                f"{prefix}.lora_rank, such as 16, or leave {prefix}.target_modules out",
                key=f"{prefix}.target_modules",
            )

    def _check_adapter(self, prefix: str, path: str) -> None:
        """What is said of adapters here is what the folder says, or nothing."""
        found = read_adapter(path, f"{prefix}.lora_adapter_path")
        unset = {"lora_rank": 0, "lora_alpha": ModelConfig.lora_alpha, "target_modules": ModelConfig.target_modules}
        for name, key in (("lora_rank", "r"), ("lora_alpha", "lora_alpha"), ("target_modules", "target_modules")):
            if getattr(self, name) not in (unset[name], found.get(key)):
                raise ConfigError(
                    f"{prefix}.{name}={getattr(self, name)}, but {prefix}.lora_adapter_path={path} has {found.get(key)}; leave "
                    f"{prefix}.{name} out",
                    key=f"{prefix}.{name}",
                )

    @property
    def adapts(self) -> bool:
        """Whether adapters learn instead of the model."""
        return self.lora_rank > 0 or self.lora_adapter_path is not None


@dataclass
class FSDPConfig:
    """strategy=fsdp and fsdp2: precision, sharding, offload."""

    dtype: str = "auto"
    """Type of the computation: float32, bfloat16, or auto (bfloat16 on a GPU, float32 on a CPU). Master weights are float32."""
    reshard_after_forward: bool = True
    """Free the gathered parameters of a layer between its forward and its backward."""
    fsdp_size: int = -1
    """Ranks that share one copy of the model; copies are kept equal by averaging gradients. -1: all ranks share one."""
    tensor_parallel_size: int = 1
    """Ranks that share every layer (fsdp2): attention heads, MLP columns, experts and the vocabulary are divided among them."""
    ulysses_sequence_parallel_size: int = 1
    """Ranks that divide the tokens of one micro-batch; attention exchanges heads for tokens (Ulysses). Divides the attention heads."""
    param_offload: bool | str = "auto"
    """Keep the weights (and gradients that wait) in host memory while the model is idle: 4 bytes per parameter, moved for each stage. auto:
    when the models on a GPU do not fit otherwise (docs/training.md)."""
    optimizer_offload: bool | str = "auto"
    """Keep AdamW's moments in host memory between updates: 8 bytes of GPU memory a parameter for the time of two copies. auto: when the
    models on a GPU do not fit otherwise."""
    use_torch_compile: bool = False
    """Compile each layer (seconds at the first update and pass). Not for llama, mistral, qwen2 and qwen3, whose own kernels are faster."""

    def check(self, prefix: str) -> None:
        """See `ModelConfig.check`."""
        one_of(f"{prefix}.dtype", self.dtype, DTYPES)
        auto_or_bool(self, prefix, "param_offload", "optimizer_offload")
        _check_sizes(self, prefix, "tensor_parallel_size", "ulysses_sequence_parallel_size")


@dataclass
class MegatronConfig:
    """strategy=megatron: how the model is divided."""

    dtype: str = "auto"
    """Type of the computation; see fsdp_config.dtype."""
    tensor_model_parallel_size: int = 1
    """Ranks that share every layer: attention heads, MLP columns and the vocabulary are divided among them."""
    pipeline_model_parallel_size: int = 1
    """Ranks that have a part of the layers each."""
    sequence_parallel: bool = False
    """With tensor parallelism: also divide the tokens between the shared parts, which saves activation memory."""
    use_distributed_optimizer: bool = True
    """Divide AdamW's moments and the master weights among the data-parallel ranks."""

    def check(self, prefix: str) -> None:
        """See `ModelConfig.check`."""
        one_of(f"{prefix}.dtype", self.dtype, DTYPES)
        at_least(self, prefix, 1, "tensor_model_parallel_size", "pipeline_model_parallel_size")


@dataclass
class TorchtitanConfig:
    """strategy=torchtitan: how the model is divided."""

    dtype: str = "auto"
    """Type of the computation; see fsdp_config.dtype."""
    tensor_parallel_size: int = 1
    """Ranks that share every layer."""
    pipeline_parallel_size: int = 1
    """Ranks that have a part of the layers each."""
    use_torch_compile: bool = False
    """Compile each layer."""

    def check(self, prefix: str) -> None:
        """See `ModelConfig.check`."""
        one_of(f"{prefix}.dtype", self.dtype, DTYPES)
        at_least(self, prefix, 1, "tensor_parallel_size", "pipeline_parallel_size")


@dataclass
class VeOmniConfig:
    """strategy=veomni: how the model is divided."""

    dtype: str = "auto"
    """Type of the computation; see fsdp_config.dtype."""
    fsdp_size: int = -1
    """Ranks that share one copy of the model; -1: all of them."""
    ulysses_parallel_size: int = 1
    """Ranks that divide the tokens of one micro-batch; attention exchanges heads for tokens (Ulysses)."""

    def check(self, prefix: str) -> None:
        """See `ModelConfig.check`."""
        one_of(f"{prefix}.dtype", self.dtype, DTYPES)
        _check_sizes(self, prefix, "ulysses_parallel_size")


def _check_sizes(section: FSDPConfig | VeOmniConfig, prefix: str, *names: str) -> None:
    """fsdp_size may be -1; it and the others are at least 1 otherwise."""
    at_least(section, prefix, 1, *names, *(() if section.fsdp_size == -1 else ("fsdp_size",)))


EngineConfig = FSDPConfig | MegatronConfig | TorchtitanConfig | VeOmniConfig


SECTIONS: dict[str, type[EngineConfig]] = {
    "fsdp_config": FSDPConfig, "megatron": MegatronConfig, "torchtitan": TorchtitanConfig, "veomni": VeOmniConfig,
}  # fmt: skip
"""The section of each training engine. Only that of the chosen strategy is read, shown and written."""


def section_of(strategy: str) -> str:
    """Return the name of the section that the strategy reads."""
    return strategy if strategy in SECTIONS else "fsdp_config"


@dataclass
class EngineChoice:
    """Which training engine a model lives in. Only the section of the chosen strategy is read."""

    strategy: str = "fsdp2"
    """Training engine: fsdp, fsdp2, megatron, torchtitan or veomni (the last three are packages of their own; see docs/backends.md)."""
    fsdp_config: FSDPConfig = field(default_factory=FSDPConfig)
    megatron: MegatronConfig = field(default_factory=MegatronConfig)
    torchtitan: TorchtitanConfig = field(default_factory=TorchtitanConfig)
    veomni: VeOmniConfig = field(default_factory=VeOmniConfig)

    def check(self, prefix: str) -> None:
        """See `ModelConfig.check`."""
        one_of(f"{prefix}.strategy", self.strategy, STRATEGIES)
        for name in SECTIONS:
            getattr(self, name).check(f"{prefix}.{name}")

    @property
    def engine(self) -> EngineConfig:
        """The section of the chosen strategy."""
        section: EngineConfig = getattr(self, section_of(self.strategy))
        return section

    @property
    def token_ranks(self) -> int:
        """Ranks that divide the tokens of one micro-batch, so that it may hold so many times the tokens of one."""
        if self.strategy == "veomni":
            return self.veomni.ulysses_parallel_size
        return self.fsdp_config.ulysses_sequence_parallel_size if self.strategy in ("fsdp", "fsdp2") else 1


def check_learner(model: ModelConfig, choice: EngineChoice, key: str, model_key: str) -> None:
    """Raise ConfigError when the model is to have adapters, or its experts a balanced load, and its engine has no such thing."""
    if model.router_aux_loss_coef:
        _check_balanced(f"{model_key}.router_aux_loss_coef", model.router_aux_loss_coef, choice, key)
    if not model.adapts:
        return
    name = "lora_rank" if model.lora_rank else "lora_adapter_path"
    asked = f"{model_key}.{name}={getattr(model, name)}"
    if choice.strategy not in ("fsdp", "fsdp2"):
        raise ConfigError(
            f"{asked} needs {key}.strategy=fsdp2 or fsdp, not {choice.strategy}; leave {model_key}.{name} out to train the whole model",
            key=f"{model_key}.{name}",
        )
    if choice.fsdp_config.tensor_parallel_size > 1:
        raise ConfigError(
            f"{asked} does not go with {key}.fsdp_config.tensor_parallel_size={choice.fsdp_config.tensor_parallel_size}: adapters are "
            "not split; set one of them to its default",
            key=f"{model_key}.{name}",
        )


@dataclass
class OptimConfig:
    """AdamW: learning rate, its schedule, clipping of gradients."""

    lr: float = 1e-6
    """Learning rate after warm-up."""
    weight_decay: float = 0.01
    """AdamW's weight decay."""
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    """AdamW's two betas."""
    clip_grad: float = 1.0
    """Largest gradient norm; larger gradients are scaled down to it. 0: no clipping."""
    lr_scheduler_type: str = "constant"
    """After the warm-up: constant, cosine or linear (fall to lr * min_lr_ratio at the last step), or wsd (constant, then linear in the last
    lr_decay_steps_ratio of all steps)."""
    lr_warmup_steps: int = -1
    """Optimizer steps of linear warm-up; -1 uses lr_warmup_steps_ratio."""
    lr_warmup_steps_ratio: float = 0.0
    """The same as a share of all optimizer steps."""
    min_lr_ratio: float = 0.0
    """Where the learning rate ends, as a share of lr; constant stays at lr."""
    lr_decay_steps_ratio: float = 0.2
    """wsd: the share of all optimizer steps in which the learning rate falls."""

    def check(self, prefix: str) -> None:
        """See `ModelConfig.check`."""
        one_of(f"{prefix}.lr_scheduler_type", self.lr_scheduler_type, SCHEDULES)
        in_range(self, prefix, 0.0, 1.0, "lr_warmup_steps_ratio", "min_lr_ratio", "lr_decay_steps_ratio")
        at_least(self, prefix, 0.0, "lr", "clip_grad", "weight_decay")
        at_least(self, prefix, -1, "lr_warmup_steps")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ConfigError(
                f"{prefix}.betas={self.betas} must be two numbers, each at least 0 and below 1, such as [0.9, 0.999]",
                key=f"{prefix}.betas",
            )


def _check_balanced(asked_key: str, coef: float, choice: EngineChoice, key: str) -> None:
    asked = f"{asked_key}={coef:g}"
    if choice.strategy not in ("fsdp", "fsdp2"):
        raise ConfigError(f"{asked} needs {key}.strategy=fsdp2 or fsdp, not {choice.strategy}; set it to 0", key=asked_key)
    size = choice.fsdp_config.ulysses_sequence_parallel_size
    if size > 1:
        raise ConfigError(
            f"{asked} needs whole rows on each rank: set {key}.fsdp_config.ulysses_sequence_parallel_size={size} to 1, or the "
            "coefficient to 0",
            key=asked_key,
        )


def read_adapter(folder: str, key: str) -> dict[str, Any]:
    """The arguments of peft's LoraConfig for the adapter in `folder`, the value of `key`.

    Raises ConfigError unless it is a LoRA adapter in safetensors, with adapters of one rank beside linear layers and nothing else that
    learns but a score head.
    """
    path = Path(folder)
    for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
        if not (path / name).is_file():
            raise ConfigError(
                f"{key}={folder} has no {name}; name a folder that peft wrote, such as global_step_N/actor/adapter of a checkpoint",
                key=key,
            )
    try:
        found = json.loads((path / ADAPTER_CONFIG).read_text())
        kind = found.get("peft_type")
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(f"{key}={folder}: {ADAPTER_CONFIG} cannot be read: {error!r}", key=key) from error
    if kind != "LORA":
        raise ConfigError(f"{key}={folder} is not a LoRA adapter but peft_type={kind}; start from a LoRA adapter", key=key)
    for name, value in found.items():
        if not _is_plain(name, value):
            raise ConfigError(
                f"{key}={folder} has {name}={value}, which cannot be trained here; merge the adapter into its model with peft "
                "(merge_and_unload) and start from that with model.path",
                key=key,
            )
    if not isinstance(found.get("r"), int) or found["r"] < 1 or not found.get("target_modules"):
        raise ConfigError(f"{key}={folder}: {ADAPTER_CONFIG} has no rank (r) or no target_modules; it is not complete", key=key)
    return {name: found[name] for name in _KEPT if name in found}


def _is_plain(name: str, value: Any) -> bool:
    """Whether an option leaves the adapter what `read_adapter` returns."""
    if name == "modules_to_save":  # peft names both for whatever classifies; the file says which there is
        return set(value or ()) <= {"score", "classifier"}
    return not value or name in _KEPT or name in _OF_NO_EFFECT or value in _ALLOWED.get(name, ())
