"""Layouts that cannot be, said before a model is loaded."""

from typing import Any

from lockstep.config.engine import EngineChoice
from lockstep.errors import ConfigError
from lockstep.models.routers import FAMILIES
from lockstep.workers.engine.sequence import check_sequence_ranks

SPLIT_KINDS = {
    "colwise", "rowwise", "embedding_rowwise", "replicated_with_grad_allreduce", "colwise_gather_output", "rowwise_split_input",
    "moe_tp_experts",
}  # fmt: skip
"""What may be said of a layer in a family's plan (transformers' base_model_tp_plan)."""


def is_of_experts(pattern: str) -> bool:
    """Whether an entry of a plan is for the columns of experts, which are not split: the experts are divided."""
    return ".experts." in pattern


def check(choice: EngineChoice, hf_config: Any, world_size: int, device_type: str, key: str) -> None:
    """Raise ConfigError unless `world_size` ranks of any device can hold a model of `hf_config` as `choice.fsdp_config` says; `key` is
    where that section stands in the configuration."""
    section = choice.fsdp_config
    strategy = choice.strategy
    size = section.tensor_parallel_size
    key_of_size = f"{key}.tensor_parallel_size"
    if size > 1:
        if strategy != "fsdp2":
            raise ConfigError(f"{key_of_size}={size} needs strategy=fsdp2; {strategy} cannot split a layer")
        if world_size % size:
            raise ConfigError(f"{key_of_size}={size} must divide the {world_size} ranks: that many share each layer")
        _check_model(hf_config.get_text_config(), size, key_of_size)
    sequence = section.ulysses_sequence_parallel_size
    if sequence > 1 and size > 1:
        raise ConfigError(
            f"{key}.ulysses_sequence_parallel_size={sequence} does not go with {key_of_size}={size}: heads can be divided once; "
            "set one of them to 1"
        )
    check_sequence_ranks(sequence, hf_config, world_size, f"{key}.ulysses_sequence_parallel_size")
    data_ranks = world_size // size
    if section.fsdp_size != -1 and data_ranks % section.fsdp_size:
        left = f"{data_ranks} ranks" if size == 1 else f"{data_ranks} ranks that {world_size} leave with {key_of_size}={size}"
        raise ConfigError(
            f"{key}.fsdp_size={section.fsdp_size} must divide the {left}: each group of that many holds one copy; -1 is one copy in all"
        )


def _check_model(config: Any, size: int, key: str) -> None:
    plan = getattr(config, "base_model_tp_plan", None) or {}
    unknown = sorted({kind for pattern, kind in plan.items() if not is_of_experts(pattern)} - SPLIT_KINDS)
    if not plan or unknown:
        why = f"its plan has {', '.join(unknown)}" if unknown else "transformers has no plan for it"
        raise ConfigError(f"{key}={size} does not know how to split {config.model_type} ({why}); set {key}=1")
    is_mixture = config.model_type in FAMILIES
    if not is_mixture and ("moe_tp_experts" in plan.values() or any(map(is_of_experts, plan))):
        raise ConfigError(f"{key}={size} divides experts of {', '.join(FAMILIES)}, not of {config.model_type}; set {key}=1")
    heads = config.num_attention_heads
    counts = {
        "attention heads": heads,
        "key-value heads": getattr(config, "num_key_value_heads", None) or heads,
        "MLP columns": config.intermediate_size,
    }
    if is_mixture:
        counts["experts"] = config.num_experts  # by attribute_map of Mixtral too
    for what, count in counts.items():
        if count % size:
            raise ConfigError(f"{key}={size} cannot split the model's {count} {what} evenly; choose a divisor of {count}")
