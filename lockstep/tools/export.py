"""`lockstep export RUN|CHECKPOINT|FOLDER OUT --dtype bfloat16 [--merge]`: a folder for others. See docs/export.md.

```text
a checkpoint                   its policy: config, tokenizer and weights in the type asked for, without the optimizer
one with an adapter (LoRA)     the adapter in peft's format; with --merge the model with the adapter in it
a folder that peft wrote       the adapter; with --merge the model that it names, with the adapter in it
```

Weights are read, converted and written one tensor at a time.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.config.engine import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from lockstep.errors import ConfigError, DataError, ResourceError, as_command
from lockstep.observability.waiting import shown_work
from lockstep.tools.load_model import ModelSource, find_model

if TYPE_CHECKING:
    import torch
    from torch import Tensor

DTYPES = ("bfloat16", "float16", "float32")
_ADAPTER = "adapter"
"""The folder of a checkpoint's policy that has its adapter."""
_FILE_BYTES = 5 * 10**9
"""The largest file of weights, as the hub likes them."""
_OWN_FILES = ("optimizer_progress.json",)
"""What a checkpoint has beside a model."""
_TOKENIZER = ("token", "special", "added", "chat_template", "vocab", "merges")
"""How the names of a tokenizer's files begin."""
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")


@as_command
def main(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit status."""
    options = _parser().parse_args(list(arguments))
    with shown_work(f"exporting {options.source}"):
        what = export(options.source, options.out, options.dtype, options.merge)
    print(f"{what} in {options.dtype}: {options.out}")
    return 0


def export(path: str, out: Path, dtype: str, merge: bool) -> str:
    """Write the model that `path` names to the new folder `out`, which is there only when it is complete; returns what it is.

    Raises ConfigError for a folder that is not empty, DataError for a source that is no whole model or has a weight that the type cannot
    hold, ResourceError where nothing can be written.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} is there already; name a new folder")
    parts = find_parts(path, merge)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        part = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    except OSError as error:
        raise ResourceError(f"{out} cannot be made: {error.strerror or error}; name a folder that can be written") from error
    try:
        what = _write(parts, part, dtype)
        part.chmod(0o755)
        if out.is_dir():
            out.rmdir()
        part.rename(out)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return what


@dataclass(frozen=True)
class Parts:
    """Where what is exported lies."""

    source: ModelSource
    folder: Path
    """The model's, or for an adapter alone the one that has the tokenizer."""
    adapter: Path | None
    """Where it has one."""
    merge: bool


def find_parts(path: str, merge: bool) -> Parts:
    """What `path` means; nothing is loaded. Raises DataError where there is no such model on this machine, ConfigError where `merge` asks
    for an adapter that is not there."""
    from lockstep.models.source import model_folder

    source = find_model(path)
    folder = Path(model_folder(source.path)).expanduser()
    adapter = Path(source.adapter) if source.adapter else folder / _ADAPTER
    has_adapter = (adapter / ADAPTER_CONFIG).is_file()
    if merge and not has_adapter:
        raise ConfigError(f"--merge: {path} has no adapter; leave --merge out")
    if not (folder / "config.json").is_file():
        if has_adapter and not merge:
            return Parts(source, adapter, adapter, merge)
        raise DataError(
            f"{source.path} is not a model folder on this machine: there is no config.json; name a run, a checkpoint or such a folder"
        )
    return Parts(source, folder, adapter if has_adapter else None, merge)


def _write(parts: Parts, out: Path, dtype: str) -> str:
    import torch

    from lockstep.models.weight_files import WeightFiles

    folder = parts.folder
    number = getattr(torch, dtype)
    if parts.adapter is not None and not parts.merge:
        _write_adapter(parts.adapter, out, number)
        _copy_files(folder, out, lambda name: name.startswith(_TOKENIZER))
        return "the adapter"
    if parts.source.adapter is not None:
        shapes, read = _merged(parts.source)
    else:
        files = WeightFiles(folder)
        if not files.shapes:
            raise DataError(f"{folder} has no weights in safetensors")
        shapes = files.shapes
        read = lambda name: files.read(name, 0, (shapes[name] or (0,))[0])  # noqa: E731
    _write_model(shapes, read, out, number)
    _copy_files(folder, out, lambda name: not name.endswith(_WEIGHTS) and name not in _OWN_FILES)
    config = json.loads((out / "config.json").read_text())
    config.pop("torch_dtype", None)  # the name that older versions read
    (out / "config.json").write_text(json.dumps(config | {"dtype": dtype}, indent=2) + "\n")
    return "the model with its adapter merged" if parts.adapter is not None else "the model"


def _write_model(shapes: dict[str, tuple[int, ...]], read: Callable[[str], Tensor], out: Path, dtype: torch.dtype) -> None:
    from lockstep.models.weight_files import write_weights
    from lockstep.workers.engine.checkpoint import WEIGHTS, Place, divide, num_bytes, write_index, write_shares

    specs = {name: (dtype, shape) for name, shape in shapes.items()}
    num_files = -(-sum(map(num_bytes, specs.values())) // _FILE_BYTES)
    shares = divide(specs, num_files)
    for rank, share in enumerate(shares):
        tensors = ((name, _converted(name, read(name), dtype)) for name in share)
        write_shares(out / WEIGHTS, specs, tensors, Place(rank, num_files), write_weights)
    write_index(out / WEIGHTS, specs, num_files)


def _merged(source: ModelSource) -> tuple[dict[str, tuple[int, ...]], Callable[[str], Tensor]]:
    """Someone's adapter in the model that it was trained beside, which is loaded for it."""
    from lockstep.config.engine import ModelConfig
    from lockstep.generation import load_module

    model = load_module(ModelConfig(path=source.path, lora_adapter_path=source.adapter), "sdpa")
    parameters = dict(model.named_parameters())
    return {name: tuple(parameter.shape) for name, parameter in parameters.items()}, lambda name: parameters[name].detach()


def _write_adapter(adapter: Path, out: Path, dtype: torch.dtype) -> None:
    from lockstep.models.weight_files import WeightFiles, write_weights

    files = WeightFiles(adapter, ADAPTER_WEIGHTS)
    if not files.shapes:
        raise DataError(f"{adapter} has no {ADAPTER_WEIGHTS}")
    tensors = ((name, _converted(name, files.read(name, 0, shape[0]), dtype)) for name, shape in files.shapes.items())
    write_weights(out / ADAPTER_WEIGHTS, {name: (dtype, shape) for name, shape in files.shapes.items()}, tensors)
    shutil.copyfile(adapter / ADAPTER_CONFIG, out / ADAPTER_CONFIG)


def _converted(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    converted = tensor.to(dtype)
    if not converted.isfinite().all():
        raise DataError(f"the weight {name} has numbers up to {tensor.abs().max():.3g}, which {dtype} cannot hold; choose bfloat16")
    return converted


def _copy_files(folder: Path, out: Path, is_wanted: Callable[[str], bool]) -> None:
    for file in sorted(folder.iterdir()):
        if file.is_file() and is_wanted(file.name):
            shutil.copyfile(file, out / file.name)


def add_export_arguments(parser: argparse.ArgumentParser) -> None:
    """What `export` reads, but for where to."""
    parser.add_argument("source", help="a run's folder (its newest checkpoint), a checkpoint, or a Hugging Face folder")
    parser.add_argument("--dtype", choices=DTYPES, default=DTYPES[0], help=f"the type of the weights (default {DTYPES[0]})")
    parser.add_argument("--merge", action="store_true", help="with an adapter (LoRA): the whole model, with the adapter in it")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lockstep export", description="A model as a Hugging Face folder for others.", allow_abbrev=False
    )
    add_export_arguments(parser)
    parser.add_argument("out", type=Path, help="the folder to write; it must be new or empty")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
