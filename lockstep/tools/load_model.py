"""A model that only generates, for `serve`, `eval`, `generate` and `chat`: found by a path, loaded, with its tokenizer and an engine.

```text
a Hugging Face folder, hub id, .gguf file, smollm2-135m     the model itself
a checkpoint, global_step_N                                 its policy (actor); adapters (LoRA) are merged into it already
a run's folder                                              the policy of its newest checkpoint, also while the run goes on
a folder that peft wrote (adapter_config.json)              the model that it names, with the adapter merged into it
```
"""

from __future__ import annotations

import argparse
import functools
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.checkpoint import folders
from lockstep.checkpoint.lock import LOCK
from lockstep.config.engine import ADAPTER_CONFIG, DTYPES, read_adapter
from lockstep.errors import ConfigError, DataError, LockstepError
from lockstep.observability.waiting import shown_work

if TYPE_CHECKING:  # what follows takes seconds to import: a wrong path is said before
    from transformers import PreTrainedTokenizerBase

    from lockstep.config.actor_rollout_ref import RolloutConfig
    from lockstep.workers.rollout.base import RolloutEngine

POLICY = "actor"
"""The folder of a checkpoint that has the model that generates."""

_OPTION_OF = {
    r"(actor_rollout_ref\.)?rollout\.fallback_to_hf=true": "--engine hf",
    r"(actor_rollout_ref\.)?rollout\.name": "--engine",
    r"(actor_rollout_ref\.)?rollout\.max_num_seqs": "--max-num-seqs",
    r"(actor_rollout_ref\.)?rollout\.gpu_memory_utilization": "--gpu-memory-utilization",
    r"trainer\.device": "--device",
    r"sampling\.temperature": "--temperature",
    r"sampling\.top_p": "--top-p",
    r"sampling\.top_k": "--top-k",
    r"sampling\.min_p": "--min-p",
    r"sampling\.max_tokens": "--max-tokens",
}
"""What errors call a setting in training -> what these commands call it."""


@dataclass(frozen=True)
class ModelSource:
    """Where a model's files are."""

    path: str
    """A Hugging Face folder, hub id, .gguf file or name, for `ModelConfig.path`."""
    adapter: str | None = None
    """A LoRA adapter to merge into it."""
    step: int | None = None
    """Of a checkpoint: its step."""


@dataclass(frozen=True)
class LoadedModel:
    """A model that can generate."""

    source: ModelSource
    tokenizer: PreTrainedTokenizerBase
    engine: RolloutEngine
    """Has `decode_text`, so stop strings work."""
    stop_token_ids: tuple[int, ...]
    """The tokens that end a response."""


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments that `load_model_of` reads."""
    parser.add_argument(
        "model", help="a Hugging Face folder or hub id, a .gguf file, smollm2-135m, a checkpoint, or a run's folder (its newest)"
    )
    parser.add_argument("--adapter", metavar="FOLDER", help="a LoRA adapter that peft or a checkpoint wrote, merged into the model")
    parser.add_argument("--dtype", choices=DTYPES, default="auto", help="auto: bfloat16 on a GPU, float32 on a CPU")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--engine", choices=("native", "hf", "vllm"), default="native", help="what generates (default: native)")
    parser.add_argument("--max-num-seqs", type=int, default=256, metavar="N", help="sequences decoded at once (default: 256)")
    parser.add_argument(
        "--gpu-memory-utilization", type=float, default=0.8, metavar="SHARE",
        help="of the GPU memory that is free, how much the key-value cache may take (default: 0.8)",
    )  # fmt: skip
    parser.add_argument("--trust-remote-code", action="store_true", help="run Python code that comes with the model")


def names_options(main: Callable[[Sequence[str]], int]) -> Callable[[Sequence[str]], int]:
    """Decorator of a command's main: errors name its options where they would name the keys of a training run."""

    @functools.wraps(main)
    def command(arguments: Sequence[str]) -> int:
        try:
            return main(arguments)
        except LockstepError as error:
            text = as_options(str(error))
            if len(error.args) != 1 or text == str(error):
                raise
            raise type(error)(text) from error

    return command


def as_options(text: str) -> str:
    """A message in the words of these commands: `trainer.device=cpu` is `--device cpu`."""
    for key, option in _OPTION_OF.items():
        text = re.sub(rf"(?<![\w.]){key}=", f"{option} ", text)
        text = re.sub(rf"(?<![\w.]){key}\b", option, text)
    return text


def load_model_of(options: argparse.Namespace) -> LoadedModel:
    """The model of `add_model_arguments`. Raises as `find_model` and `load` do."""
    with shown_work(f"loading {options.model}"):
        return _load_model_of(options)


def _load_model_of(options: argparse.Namespace) -> LoadedModel:
    from lockstep.config.actor_rollout_ref import RolloutConfig

    source = find_model(options.model, options.adapter)
    rollout = RolloutConfig(
        name=options.engine,
        max_num_seqs=options.max_num_seqs,
        gpu_memory_utilization=options.gpu_memory_utilization,
        temperature=1.0,
    )
    return load(source, rollout, dtype=options.dtype, device=options.device, trust_remote_code=options.trust_remote_code)


def find_model(path: str, adapter: str | None = None) -> ModelSource:
    """Which files `path` means (see above); `adapter` is a folder that peft wrote, or a checkpoint's `actor/adapter`.

    Raises DataError for a run without a checkpoint and a checkpoint without a policy, ConfigError for an adapter that cannot be merged.
    Nothing is loaded; that a model is there is for `load` to say.
    """
    folder = Path(path).expanduser()
    step = None
    if any((folder / name).is_file() for name in (folders.TRACKER, LOCK)) or folders.found(folder):
        newest = folders.newest(folder)
        if newest is None:
            raise DataError(f"{path} is a run's folder without a checkpoint; wait for its first, or name a model")
        folder = newest
    if (folder / folders.STATE).is_file():
        step = int(folders.read_state(folder)["global_steps"])
        if not (folder / POLICY / "config.json").is_file():
            raise DataError(f"{folder} is a checkpoint without a model in {POLICY}/; expected one of a language model")
        folder = folder / POLICY
        path = str(folder)
    if (folder / ADAPTER_CONFIG).is_file() and not (folder / "config.json").is_file():
        if adapter is not None:
            raise ConfigError(f"{path} is an adapter itself, so --adapter={adapter} has no model to go into; name the model first")
        path, adapter = _base_of(folder), path
    if adapter is not None:
        read_adapter(adapter, "--adapter")
    return ModelSource(path, adapter, step)


def _base_of(adapter: Path) -> str:
    """The model that an adapter was trained beside."""
    try:
        base = json.loads((adapter / ADAPTER_CONFIG).read_text()).get("base_model_name_or_path")
    except (OSError, ValueError, AttributeError) as error:
        raise DataError(f"{adapter / ADAPTER_CONFIG} cannot be read: {error!r}") from error
    if not base:
        raise ConfigError(f"{adapter} does not say which model it is of; name that model, and --adapter {adapter}")
    return str(base)


def load(
    source: ModelSource, rollout: RolloutConfig, *, dtype: str = "auto", device: str = "auto", trust_remote_code: bool = False
) -> LoadedModel:
    """Load a model for generation with the engine `rollout.name`.

    Raises DataError for files that are not a whole model or tokenizer, ConfigError for a model that the engine would compute wrongly or an
    engine that is not installed, ResourceError for a device that is not there, MissingExtra for an adapter without peft.
    """
    import torch

    from lockstep.config.engine import ModelConfig
    from lockstep.generation import dtype_of, load_module
    from lockstep.models.hf_config import stop_token_ids
    from lockstep.utils.device import resolve_device
    from lockstep.utils.tokenizer import hf_tokenizer
    from lockstep.workers.rollout.base import ModuleRollout
    from lockstep.workers.rollout.registry import check_installed, get_rollout, make_rollout, process_rollout

    check_installed(rollout.name)
    kind = get_rollout(rollout.name)
    place = torch.device(resolve_device(device))
    number = dtype_of(dtype, place)
    config = ModelConfig(path=source.path, trust_remote_code=trust_remote_code, lora_adapter_path=source.adapter)
    tokenizer = hf_tokenizer(source.path, trust_remote_code)

    def decode_text(ids: list[int]) -> str:
        return str(tokenizer.decode(ids, skip_special_tokens=False))

    engine: RolloutEngine
    if issubclass(kind, ModuleRollout):
        module = load_module(config, kind.attention).to(place, number)  # type: ignore[arg-type]
        engine = make_rollout(module, rollout, tokenizer.pad_token_id, decode_text)
    elif source.adapter is not None:
        raise ConfigError(
            f"--engine {rollout.name} reads a model's own folder: merge the adapter first (lockstep export), or use native"
        )
    else:
        engine = process_rollout(rollout.name)(config, rollout, tokenizer.pad_token_id, place, number, decode_text)
    return LoadedModel(source, tokenizer, engine, stop_token_ids(source.path, tokenizer))
