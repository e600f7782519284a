"""Read and check a model's config.json and generation_config.json, without loading the model."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, GenerationConfig, PretrainedConfig

from lockstep.errors import ConfigError, DataError
from lockstep.models.source import check_hub, model_folder
from lockstep.models.weight_files import check_weight_files


def read_model_config(path: str, trust_remote_code: bool = False, **overrides: Any) -> PretrainedConfig:
    """Return the model's config.json with some entries replaced.

    Raise DataError if `path` is not a model, or one of its files of weights is cut short or missing; ConfigError for an override that the
    model's config does not have, a value of another type, and a mixture whose tokens would go to more experts than it has.
    """
    path = model_folder(path)
    folder = Path(path)
    if folder.is_file() or (folder.is_dir() and not (folder / "config.json").is_file()):
        is_adapter = (folder / "adapter_config.json").is_file()
        hint = "; it is an adapter: name its base model, and the adapter in model.lora_adapter_path" if is_adapter else ""
        raise DataError(f"{path} is not a Hugging Face model folder: there is no config.json in it{hint}")
    if not folder.exists() and (path.startswith((".", "~", "/")) or path.count("/") > 1):
        raise DataError(f"{path} does not exist; expected a Hugging Face model folder, or a hub id such as Qwen/Qwen3-0.6B")
    if folder.exists():
        check_weight_files(folder)
    else:
        check_hub(path)
    try:
        config, unknown = AutoConfig.from_pretrained(
            path, trust_remote_code=trust_remote_code, return_unused_kwargs=True, **overrides
        )
    except StrictDataclassError as error:
        wrong = " ".join(str(error).split())
        named = "model.override_config, or " if overrides else ""
        raise ConfigError(f"{named}config.json of {path} has a value that cannot be: {wrong}") from error
    except (OSError, ValueError) as error:
        first = str(error).strip().splitlines()[0]
        if folder.is_dir():
            raise DataError(f"{folder / 'config.json'} cannot be used: {first}") from error
        raise DataError(
            f"{path} is not a Hugging Face model folder, and it could not be read from the hub either ({first}); "
            "pass the path of a folder with config.json and the weights"
        ) from error
    if unknown:
        raise ConfigError(
            f"model.override_config names {', '.join(unknown)}, which {type(config).__name__} of {path} does not have"
        )
    experts, chosen = (getattr(config, name, None) for name in ("num_local_experts", "num_experts_per_tok"))
    experts = experts or getattr(config, "num_experts", None)
    if experts and chosen is not None and not 1 <= chosen <= experts:
        raise ConfigError(
            f"{path}: num_experts_per_tok={chosen} must be between 1 and its {experts} experts (model.override_config)"
        )
    return config


def stop_token_ids(path: str, tokenizer: Any) -> tuple[int, ...]:
    """Return the tokens that end a response: the tokenizer's end of sequence and those of the model's generation_config.json."""
    try:
        listed = GenerationConfig.from_pretrained(model_folder(path)).eos_token_id
    except OSError:  # the file is optional
        listed = None
    ids = {tokenizer.eos_token_id, *(listed if isinstance(listed, list) else [listed])}
    return tuple(sorted(ids - {None}))


@dataclass(frozen=True)
class RowLimit:
    """The most tokens of a row, prompt and response together."""

    tokens: int
    key: str
    """The key of config.json that sets it."""
    reason: str = ""
    """Why a longer row is refused; empty where the model simply holds no more."""

    def __str__(self) -> str:
        return f"{self.tokens} ({self.key}{': ' if self.reason else ''}{self.reason})"


def context_limit(config: Any) -> RowLimit | None:
    """Return the limit of a model with this config: its context, or a lower limit of packed rows. None if config.json names none."""
    limits = list(_packed_limits(config.get_text_config()))
    tokens = getattr(config.get_text_config(), "max_position_embeddings", None)
    if tokens is not None:
        limits.append(RowLimit(tokens, "max_position_embeddings"))
    return min(limits, key=lambda limit: limit.tokens, default=None)


def packed_limit(config: Any) -> RowLimit | None:
    """Return the limit of rows that are computed beside others or token by token; None if attention does not depend on other rows."""
    return min(_packed_limits(config.get_text_config()), key=lambda limit: limit.tokens, default=None)


def _packed_limits(config: Any) -> Iterator[RowLimit]:
    """The limits beyond which a text config's attention depends on the rows around."""
    rope = getattr(config, "rope_parameters", None) or {}
    for parameters in (rope, *rope.values()):  # some families have an entry for each type of layer
        kind = parameters.get("rope_type") if isinstance(parameters, dict) else None
        if kind == "longrope":
            tokens = parameters.get("original_max_position_embeddings") or config.original_max_position_embeddings
            reason = "rope_type=longrope has other angles for all rows of a pass where one is longer"
            yield RowLimit(tokens, "rope_parameters.original_max_position_embeddings", reason)
        elif kind is not None and "dynamic" in kind:
            reason = f"rope_type={kind} has angles that depend on the longest row of a pass"
            yield RowLimit(config.max_position_embeddings, "max_position_embeddings", reason)
    if "chunked_attention" in (getattr(config, "layer_types", None) or ()):
        reason = "attention in chunks is not computed"
        yield RowLimit(config.attention_chunk_size, "attention_chunk_size", reason)
    if getattr(config, "attn_temperature_tuning", False):
        yield RowLimit(config.floor_scale - 1, "floor_scale", "queries behind it are scaled by their place in the pass")
    if config.model_type == "phimoe" and getattr(config, "sliding_window", None):
        yield RowLimit(config.sliding_window, "sliding_window", "this family has its window in a mask only, which is not computed")
