"""Layouts and models that the torchtitan engine cannot do, refused before a model is loaded. Imports nothing of torchtitan."""

from importlib.util import find_spec
from typing import Any

from lockstep.config.engine import EngineChoice
from lockstep.errors import ConfigError

FAMILIES = ("llama", "qwen2", "qwen3")
_OTHER = "choose strategy fsdp2"


def check(choice: EngineChoice, hf_config: Any, world_size: int, device_type: str, key: str) -> None:
    """Raise ConfigError unless `world_size` ranks of any device can compute a model of `hf_config` as `choice.torchtitan` says; `key` is
    where that section stands in the configuration."""
    section = choice.torchtitan
    if find_spec("torchtitan") is None:
        raise ConfigError(f"{key} needs the package torchtitan, which is not installed: pip install 'lockstep-rl[torchtitan]'")
    tensor = section.tensor_parallel_size
    pipeline = section.pipeline_parallel_size
    tensor_key = f"{key}.tensor_parallel_size={tensor}"
    pipeline_key = f"{key}.pipeline_parallel_size={pipeline}"
    if world_size % (tensor * pipeline):
        raise ConfigError(
            f"{tensor_key} x {pipeline_key} = {tensor * pipeline} must divide the {world_size} ranks: that many compute one copy "
            "of the model"
        )
    if section.use_torch_compile and tensor > 1:
        raise ConfigError(
            f"{key}.use_torch_compile=true: torchtitan's tensor parallelism cannot be traced; set it to false, or {tensor_key} to 1"
        )
    family = hf_config.model_type
    if family not in FAMILIES:
        raise ConfigError(f"{key} knows the families {', '.join(FAMILIES)}; this model is a {family}: {_OTHER}")
    if hf_config.hidden_act != "silu":
        raise ConfigError(f"{key} computes MLPs with silu; this {family} has hidden_act={hf_config.hidden_act}: {_OTHER}")
    rope = (getattr(hf_config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope in ("dynamic", "longrope"):
        raise ConfigError(f"{key} has one set of rotary frequencies for all lengths; this {family} has rope_type={rope}: {_OTHER}")
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        count = getattr(hf_config, name)
        if count % tensor:
            raise ConfigError(f"{tensor_key} must divide {name}={count} of the model")
    vocabulary = hf_config.vocab_size
    if (tensor - 1) * -(-vocabulary // tensor) >= vocabulary:
        raise ConfigError(f"{tensor_key} leaves a rank without a part of the vocabulary of {vocabulary} tokens: lower it")
    if pipeline > hf_config.num_hidden_layers:
        raise ConfigError(f"{pipeline_key} is more than the model's {hf_config.num_hidden_layers} layers: every stage needs one")
