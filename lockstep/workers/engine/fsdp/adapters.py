"""The adapters of a sharded model (LoRA) in a checkpoint: a folder that peft loads beside the model that training started from."""

from pathlib import Path

import torch
from torch import nn

from lockstep.config.adapter import ADAPTER_WEIGHTS
from lockstep.errors import DataError
from lockstep.models.lora import ADAPTER, Lora, adapter_name, base_name
from lockstep.models.weight_files import WeightFiles, write_weights
from lockstep.workers.engine.fsdp.sharded_model import whole_tensors
from lockstep.workers.engine.fsdp.sharding import fill


def save_adapter(module: nn.Module, lora: Lora, folder: Path, *, writes: bool) -> None:
    """A folder that peft loads beside the model that training started from. Adapters are small: the first rank holds them all."""
    trained = set(lora.trained)
    tensors = {adapter_name(name): tensor for name, tensor in whole_tensors(module, trained.__contains__)}
    if writes:
        folder.mkdir(exist_ok=True)
        lora.save_config(folder)
        specs = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
        write_weights(folder / ADAPTER_WEIGHTS, specs, tensors.items())


def open_adapter(lora: Lora, path: Path) -> WeightFiles:
    """The adapters of a checkpoint. Raises DataError where it has none, or others."""
    if not (path / ADAPTER / ADAPTER_WEIGHTS).is_file():
        raise DataError(f"{path} has no adapter: it was trained with model.lora_rank=0; resume it with that")
    files = WeightFiles(path / ADAPTER, ADAPTER_WEIGHTS)
    for name, value in lora.values.items():
        found = files.shapes.get(adapter_name(name))
        if found != tuple(value.shape):
            raise DataError(
                f"{path} has other adapters: {name} has shape {found or 'none'} instead of {tuple(value.shape)}; resume with the "
                "model.lora_rank and model.target_modules that wrote it"
            )
    return files


def load_adapter(module: nn.Module, lora: Lora, path: Path, merged: WeightFiles) -> None:
    """The adapters. The model itself stays as it was loaded; that it is the one they were trained beside shows in its norms."""
    files = open_adapter(lora, path)
    vectors = {name for name, shape in merged.shapes.items() if len(shape) == 1} - set(lora.trained)
    for name, tensor in whole_tensors(module, lambda name: base_name(name) in vectors):
        if not torch.equal(tensor.float().cpu(), merged.read(base_name(name), 0, len(tensor))):
            raise DataError(
                f"{path} was trained beside another model: {base_name(name)} differs; set model.path to the one it started from"
            )
    trained = set(lora.trained)
    fill(module, lambda name, start, stop: files.read(adapter_name(name), start, stop), trained.__contains__)
