"""The files of a checkpoint. It is a Hugging Face folder, with what an optimizer needs to go on beside it:

```text
config.json, generation_config.json   what the model is
model.safetensors                     its weights, in float32 under Hugging Face names
optimizer/                            AdamW's moments
optimizer_progress.json               the updates that were done
```

Weights are gathered by all ranks and written by one, a tensor at a time: no rank holds the whole model.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel

from lockstep.errors import DataError
from lockstep.models.meta import WeightFiles
from lockstep.models.weight_file import Tensors, TensorSpec, write_weights

WEIGHTS = "model.safetensors"
OPTIMIZER = "optimizer"
PROGRESS = "optimizer_progress.json"


@dataclass(frozen=True, slots=True)
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

    def write(self, path: Path, weights: Tensors, updates: int, *, writes: bool) -> None:
        """Write the folder after so many updates, as `write_gathered` writes."""
        path.mkdir(parents=True, exist_ok=True)
        if writes:
            self.hf_config.save_pretrained(path)
            if self.generation_config is not None:
                self.generation_config.save_pretrained(path)
            (path / PROGRESS).write_text(json.dumps({"updates": updates}))
        write_gathered(path / WEIGHTS, self.specs, weights, writes=writes)

    def open(self, path: Path) -> WeightFiles:
        """The weights of a checkpoint of this model. Raises DataError where there is none, or one of another architecture."""
        if not (path / WEIGHTS).is_file():
            raise DataError(f"{path} is not a checkpoint: {WEIGHTS} is missing")
        files = WeightFiles(path)
        other = [(name, shape) for name, shape in self.shapes.items() if files.shapes.get(name) != shape]
        if other:
            name, shape = other[0]
            raise DataError(
                f"{path} is a checkpoint of another architecture: {len(other)} of {len(self.specs)} weights differ, first {name} with "
                f"shape {files.shapes.get(name, 'none')} instead of {shape}; resume with the model that wrote it, or set "
                "trainer.resume_mode=disable"
            )
        return files


def write_gathered(file: Path, specs: Mapping[str, TensorSpec], tensors: Tensors, *, writes: bool) -> None:
    """Write `tensors` as they come. Gathering each of them is for all ranks, so all call this; the one that `writes` keeps it."""
    if writes:
        write_weights(file, specs, tensors)
    else:
        deque(tensors, maxlen=0)


def read_updates(path: Path) -> int:
    """The updates that a checkpoint's optimizer has done."""
    return int(json.loads((path / PROGRESS).read_text())["updates"])


def write_moments(path: Path, moments: dict[str, Any]) -> None:
    """Write AdamW's state, Hugging Face name -> {step, exp_avg, exp_avg_sq}, each rank its own shards.

    Without the optimizer's groups: which parameters are in one depends on the layout, their settings on the config.
    """
    dcp.save({"optim": {"state": moments}}, checkpoint_id=path / OPTIMIZER)


def read_moments(path: Path, moments: dict[str, Any]) -> None:
    """Read what `write_moments` wrote, at any number of ranks, into `moments` of the same form, in place."""
    # Flattening sharded tensors (the planner's default, for FSDP over tensor parallelism) drops, on the ranks that hold nothing of it, a
    # tensor with fewer rows than there are ranks: a value head could not be loaded.
    planner = DefaultLoadPlanner(flatten_sharded_tensors=False)
    dcp.load({"optim": {"state": moments}}, checkpoint_id=path / OPTIMIZER, planner=planner)
