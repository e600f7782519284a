"""A model without weights in memory, and its weights in files: each rank of a sharded model reads its own part and nothing else."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel

from lockstep.errors import DataError

_ONE_FILE = "model.safetensors"


class WeightFiles:
    """The tensors of a Hugging Face folder in safetensors, by name. Nothing is read before it is asked for."""

    def __init__(self, folder: Path, one_file: str = _ONE_FILE) -> None:
        """`one_file` is the name of the file where the folder has no index of several, which is named after it."""
        self.folder, self._one_file = folder, one_file
        self.shapes: dict[str, tuple[int, ...]] = {}
        """Name -> shape of every tensor; empty where the folder has no safetensors."""
        self._file_of: dict[str, Path] = {}
        for file in self._files():
            try:
                with safe_open(file, framework="pt") as opened:
                    for name in list(opened.keys()):
                        self.shapes[name] = tuple(opened.get_slice(name).get_shape())
                        self._file_of[name] = file
            except (OSError, SafetensorError) as error:
                raise DataError(f"{file} cannot be read: {error}") from error

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Rows `start` to `stop` of a tensor (all of one without rows), in float32 on the CPU. Raises DataError where one of them has a
        number that is not finite."""
        file = self._file_of[name]
        with safe_open(file, framework="pt") as opened:
            rows = (opened.get_slice(name)[start:stop] if self.shapes[name] else opened.get_tensor(name)).float()
        check_finite(name, rows, str(file))
        return rows

    def _files(self) -> list[Path]:
        index = self.folder / f"{self._one_file}.index.json"
        if index.is_file():
            try:
                names = json.loads(index.read_text())["weight_map"].values()
            except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
                raise DataError(f"{index} cannot be read: {error!r}") from error
            return [self.folder / name for name in sorted(set(names))]
        return [self.folder / self._one_file] if (self.folder / self._one_file).is_file() else []


def check_finite(name: str, tensor: Tensor, source: str) -> None:
    """Raise DataError unless all numbers are finite: a model with others computes nothing, and would be blamed for it elsewhere."""
    if torch.isfinite(tensor.sum()):  # one pass over most weights; a sum that is not may have overflowed
        return
    num_nan, num_inf = int(tensor.isnan().sum()), int(tensor.isinf().sum())
    if num_nan or num_inf:
        raise DataError(
            f"{source}: the weight {name} has {num_nan} NaN and {num_inf} inf among {tensor.numel()} numbers; the file is damaged, or "
            "the training that wrote it diverged: take another checkpoint or model"
        )


class WeightSource:
    """What fills a model: files, and values for what they do not have (all of it, without files)."""

    def __init__(self, files: WeightFiles | None, given: dict[str, Tensor]) -> None:
        self._files, self._given = files, given

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Rows `start` to `stop` of a parameter, in float32 on the CPU."""
        if name in self._given:
            return self._given[name][start:stop]
        assert self._files is not None, f"{name} was not given"
        return self._files.read(name, start, stop)


def take_weights(model: PreTrainedModel) -> WeightSource:
    """Move the parameters of a model that is in memory to the meta device; returns their values as what fills it, or a shard of it."""
    given = {name: parameter.detach() for name, parameter in model.named_parameters()}
    on_meta = {id(p): nn.Parameter(p.to("meta"), requires_grad=p.requires_grad) for p in model.parameters()}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = on_meta[id(parameter)]
    return WeightSource(None, given)


def build_on_meta(factory: Any, hf_config: Any, **options: Any) -> PreTrainedModel:
    """The model of a config with parameters on the meta device, which take no memory, and buffers as they are.

    `factory` is one of transformers' Auto classes; `options` go to its from_config.
    """
    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
        register(module, name, parameter)

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign, assignment]
    try:
        return factory.from_config(hf_config, **options)
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def missing_weights(model: PreTrainedModel, files: WeightFiles) -> list[str] | None:
    """The names of the model's parameters that the files do not have.

    None where the files cannot fill the model name by name: a shape is another one, or a saved buffer is needed. (Families whose files
    hold their weights in another form, as experts one by one, miss names.)
    """
    wanted = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    if any(shape != files.shapes.get(name, shape) for name, shape in wanted.items()):
        return None
    if any(set(module._buffers) - module._non_persistent_buffers_set for module in model.modules()):
        return None
    return [name for name in wanted if name not in files.shapes]


def draw_weights(model: PreTrainedModel, name: str, seed: int, std: float | None = None) -> Tensor:
    """A new value for a parameter of a linear layer, from `seed` alone: normal around 0 with `std`, or as transformers would draw it."""
    layer = model.get_submodule(name.rpartition(".")[0])
    assert isinstance(layer, nn.Linear), f"{name} is not in a linear layer"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        drawn = nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None)
        torch.manual_seed(seed)
        if std is None:
            model._init_weights(drawn)
        else:
            nn.init.normal_(drawn.weight, std=std)
    return dict(drawn.named_parameters())[name.rpartition(".")[2]].detach()
