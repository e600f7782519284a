"""The files of a checkpoint. It is a Hugging Face folder, with what an optimizer needs to go on beside it:

```text
config.json, generation_config.json          what the model is
model.safetensors                            its weights, in float32 under Hugging Face names
optimizer/exp_avg.safetensors, exp_avg_sq    AdamW's moments, whole tensors under the same names
optimizer_progress.json                      the updates that were done
```

Every rank writes a share of the whole tensors: of several ranks the files are `model-00001-of-00002.safetensors` and so on, with an index.
Tensors are gathered by all ranks one at a time, so no rank holds the whole model. Nothing is pickled: reading a checkpoint runs no code.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel

from lockstep.errors import DataError
from lockstep.models.weight_files import Tensors, TensorSpec, WeightFiles

WEIGHTS = "model.safetensors"
OPTIMIZER = "optimizer"
PROGRESS = "optimizer_progress.json"
MOMENTS = ("exp_avg", "exp_avg_sq")

Specs = Mapping[str, TensorSpec]
"""Name -> type and shape of tensors that come."""
Write = Callable[[Path, Specs, Tensors], None]
"""(file, what comes, the tensors as they come) -> None: `write_weights`, or what does it later. Takes all of the tensors."""


@dataclass(frozen=True)
class Place:
    """This rank among those that write a checkpoint."""

    rank: int
    world_size: int


@dataclass(frozen=True)
class Progress:
    """How far an optimizer is."""

    updates: int
    steps: Mapping[str, int]
    """Name -> the updates of each weight; fewer than `updates` where one had no gradient."""


@dataclass(frozen=True)
class ModelFolder:
    """A model as a Hugging Face folder: all that is written of it but the values of its weights."""

    hf_config: PretrainedConfig
    generation_config: GenerationConfig | None
    """Of a language model: the stop tokens of chat models are listed there."""
    specs: Mapping[str, TensorSpec]
    """Hugging Face name -> type and shape of every weight."""

    @classmethod
    def of(cls, module: PreTrainedModel, specs: Mapping[str, TensorSpec] | None = None) -> ModelFolder:
        """The folder of a model of transformers, whose config learns its class. `specs` where it has other weights than its parameters."""
        module.config.architectures = [type(module).__name__]
        if specs is None:
            specs = {name: (parameter.dtype, tuple(parameter.shape)) for name, parameter in module.named_parameters()}
        return cls(module.config, module.generation_config if module.can_generate() else None, specs)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Hugging Face name -> shape."""
        return {name: shape for name, (_, shape) in self.specs.items()}

    def write_config(self, path: Path) -> None:
        """Write what the model is, without its weights."""
        self.hf_config.save_pretrained(path)
        if self.generation_config is not None:
            self.generation_config.save_pretrained(path)

    def open(self, path: Path) -> WeightFiles:
        """The weights of a checkpoint of this model. Raises DataError where there is none, or one of another architecture."""
        files = WeightFiles(path)
        if not files.shapes:
            raise DataError(f"{path} is not a checkpoint: {WEIGHTS} is missing")
        other = [(name, shape) for name, shape in self.shapes.items() if files.shapes.get(name) != shape]
        if other:
            name, shape = other[0]
            raise DataError(
                f"{path} is a checkpoint of another architecture: {len(other)} of {len(self.specs)} weights differ, first {name} with "
                f"shape {files.shapes.get(name, 'none')} instead of {shape}; resume with the model that wrote it, or set "
                "trainer.resume_mode=disable"
            )
        return files


def write_shares(file: Path, specs: Specs, tensors: Tensors, place: Place, write: Write) -> None:
    """Write this rank's share of `tensors`. Gathering each of them is for all ranks, so all call this.

    `file` is the name where one rank writes all of them; the files of several ranks are numbered and have an index (`write_index`).
    """
    shares = divide(specs, place.world_size)
    if place.rank >= len(shares):
        deque(tensors, maxlen=0)
        return
    own = shares[place.rank]
    chosen = ((name, tensor) for name, tensor in tensors if name in own or name not in specs)
    write(_files(file, len(shares))[place.rank], own, chosen)


def write_index(file: Path, specs: Specs, world_size: int) -> None:
    """Write which of the files of `write_shares` has which tensor, where there are several."""
    shares = divide(specs, world_size)
    if len(shares) > 1:
        files = _files(file, len(shares))
        weight_map = {name: path.name for path, share in zip(files, shares, strict=True) for name in share}
        total = sum(num_bytes(spec) for spec in specs.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        Path(f"{file}.index.json").write_text(json.dumps(index, indent=1))


def divide(specs: Specs, parts: int) -> list[dict[str, TensorSpec]]:
    """Shares of about equally many bytes, none of them empty, in the order of `specs`; the same on every rank."""
    shares: list[dict[str, TensorSpec]] = [{} for _ in range(max(1, min(parts, len(specs))))]
    sizes = [0] * len(shares)
    for name in sorted(specs, key=lambda name: -num_bytes(specs[name])):
        least = min(range(len(shares)), key=lambda part: (bool(shares[part]), sizes[part]))
        shares[least][name] = specs[name]
        sizes[least] += num_bytes(specs[name])
    return [{name: specs[name] for name in specs if name in share} for share in shares]


def open_moments(path: Path, kind: str, specs: Specs) -> WeightFiles:
    """One of MOMENTS of a checkpoint. Raises DataError where it has none for these weights."""
    files = WeightFiles(path / OPTIMIZER, f"{kind}.safetensors")
    other = [name for name, (_, shape) in specs.items() if files.shapes.get(name) != shape]
    if other:
        raise DataError(
            f"{path / OPTIMIZER} has no {kind} for {len(other)} of {len(specs)} weights, first {other[0]}: it was saved without an "
            "optimizer, or by one that trains other weights. Give its weights as model.path instead of resuming it"
        )
    return files


def write_progress(path: Path, progress: Progress) -> None:
    """Write how far the optimizer is."""
    (path / PROGRESS).write_text(json.dumps({"updates": progress.updates, "steps": dict(progress.steps)}))


def read_progress(path: Path, specs: Specs) -> Progress:
    """Read that of these weights. Raises DataError where it is not there or not one."""
    try:
        found = json.loads((path / PROGRESS).read_text())
        progress = Progress(int(found["updates"]), {name: int(found["steps"][name]) for name in specs})
        if min(progress.updates, *progress.steps.values()) < 0:
            raise ValueError("a number of updates is negative")
        return progress
    except (OSError, ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise DataError(f"{path / PROGRESS} cannot be read: {error!r}") from error


def _files(file: Path, count: int) -> list[Path]:
    """The names that Hugging Face gives to several files."""
    if count == 1:
        return [file]
    return [file.with_name(f"{file.stem}-{number:05d}-of-{count:05d}{file.suffix}") for number in range(1, count + 1)]


def num_bytes(spec: TensorSpec) -> int:
    """The bytes of a tensor."""
    dtype, shape = spec
    return torch.Size(shape).numel() * dtype.itemsize
