"""Whether a model can be laid out as the config asks, found out before anything is loaded and without importing megatron-core."""

from importlib.util import find_spec
from typing import Any

from lockstep.config.engine import EngineChoice
from lockstep.errors import ConfigError

FAMILIES = ("llama", "qwen2", "qwen3")
ROPE_TYPES = ("default", "linear", "llama3")
"""Rotary embeddings whose frequencies do not depend on the length, and that do not scale queries and keys."""
PACKAGE = "megatron.core"
INSTALL = "pip install 'lockstep-rl[megatron]'"


def check(choice: EngineChoice, hf_config: Any, world_size: int, device_type: str, key: str) -> None:
    """Raise ConfigError unless a model of `hf_config` can be trained by megatron-core on `world_size` ranks as `choice.megatron` says;
    `key` is where that section stands in the configuration."""
    section = choice.megatron
    if not _installed(PACKAGE):
        raise ConfigError(f"{key}: strategy=megatron needs the package megatron-core, which is not installed: {INSTALL}")
    _check_model(hf_config)
    tp = section.tensor_model_parallel_size
    pp = section.pipeline_model_parallel_size
    if world_size % (tp * pp):
        raise ConfigError(
            f"{key}: {world_size} ranks do not divide into copies of the model on tensor_model_parallel_size={tp} x "
            f"pipeline_model_parallel_size={pp} = {tp * pp} ranks; set sizes whose product divides {world_size}"
        )
    if section.sequence_parallel and tp == 1:
        raise ConfigError(
            f"{key}.sequence_parallel=true divides the tokens among the ranks of tensor parallelism, of which there is one; set "
            f"{key}.tensor_model_parallel_size above 1, or sequence_parallel=false"
        )
    divided = {name: getattr(hf_config, name) for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size")}
    for name, count in divided.items():
        if count % tp:
            raise ConfigError(
                f"{key}.tensor_model_parallel_size={tp} does not divide the model's {name}={count}; set one that does, such as "
                f"{_largest_divisor(tuple(divided.values()), tp)}"
            )
    layers = hf_config.num_hidden_layers
    if layers % pp:
        raise ConfigError(
            f"{key}.pipeline_model_parallel_size={pp} does not divide the model's num_hidden_layers={layers}; set one that does, such "
            f"as {_largest_divisor((layers,), pp)}"
        )
    if device_type != "cuda":
        _check_device(device_type, key)


def _check_device(device_type: str, key: str) -> None:
    """megatron-core asks for CUDA everywhere."""
    import torch

    try:
        torch.cuda.current_device()
    except (RuntimeError, AssertionError):
        raise ConfigError(
            f"{key}: strategy=megatron computes on NVIDIA GPUs only, and the device is {device_type}; set strategy=fsdp2, torchtitan or "
            "veomni, which also compute on a CPU"
        ) from None


def _check_model(hf_config: Any) -> None:
    family = hf_config.model_type
    remedy = "use strategy fsdp2, which takes any model of transformers"
    if family not in FAMILIES:
        raise ConfigError(f"strategy=megatron knows the model families {', '.join(FAMILIES)}, not {family}; {remedy}")
    rope = hf_config.rope_parameters.get("rope_type", "default")
    if rope not in ROPE_TYPES:
        raise ConfigError(f"strategy=megatron knows the rotary embeddings {', '.join(ROPE_TYPES)}, not {rope}; {remedy}")
    if hf_config.hidden_act != "silu":
        raise ConfigError(f"strategy=megatron knows the activation silu, not hidden_act={hf_config.hidden_act}; {remedy}")
    for name in ("attention_bias", "mlp_bias"):
        if getattr(hf_config, name, False):
            raise ConfigError(f"strategy=megatron cannot train a {family} model with {name}=true; {remedy}")


def _installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:  # the package around it is missing
        return False


def _largest_divisor(counts: tuple[int, ...], below: int) -> int:
    return max(size for size in range(1, below) if all(count % size == 0 for count in counts))
