"""What a model folder says about itself, without loading the model."""

from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, GenerationConfig, PretrainedConfig

from lockstep.errors import ConfigError, DataError
from lockstep.utils.hub import check_hub
from lockstep.utils.model_source import model_folder
from lockstep.utils.weight_files import check_weight_files


def read_model_config(path: str, trust_remote_code: bool = False, **overrides: Any) -> PretrainedConfig:
    """The model's config.json with some entries replaced.

    Raises DataError when `path` is not a model, or one of its files of weights is cut short or missing; ConfigError for an override that
    the model's config does not have, a value of another type than it is, and a mixture whose tokens would go to more experts than there
    are.
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
    """The tokens that end a response: the tokenizer's end of sequence and those of the model's generation_config.json."""
    try:
        listed = GenerationConfig.from_pretrained(model_folder(path)).eos_token_id
    except OSError:  # the file is optional
        listed = None
    ids = {tokenizer.eos_token_id, *(listed if isinstance(listed, list) else [listed])}
    return tuple(sorted(ids - {None}))
