"""LoRA through peft: a small product of two matrices beside each linear layer is trained, the model itself stays as it is.

An adapted layer computes W x + s B (A x) with s = lora_alpha / lora_rank. A [r, in] is drawn uniformly from +-1/sqrt(in), B [out, r]
starts at 0, so that training starts from the model; or both come from a folder that peft wrote (model.lora_adapter_path). Outside the
engine and its decoder (adapted.py) nobody knows: exported weights are W + s B A under their Hugging Face names. A value or score head is
trained whole.
"""

import importlib.util
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lockstep.config.adapter import ADAPTER_WEIGHTS, read_adapter
from lockstep.config.engine import ModelConfig
from lockstep.errors import ConfigError, DataError, MissingExtra
from lockstep.models.adapted import adapt
from lockstep.models.load import Head
from lockstep.models.meta import WeightFiles, WeightSource
from lockstep.models.routers import FAMILIES

ADAPTER = "adapter"
"""The folder of a checkpoint with the adapter in peft's format."""
_PREFIX = "base_model.model."
"""What peft puts before every name in a file."""


class Lora:
    """The adapters of one model; making it puts them into the model, and leaves nothing else to train but a value or score head."""

    def __init__(self, model: PreTrainedModel, config: ModelConfig, head: Head, seed: int) -> None:
        """Raises MissingExtra without peft, ConfigError when target_modules names something that is not a linear layer inside, and
        DataError for an adapter to start from whose tensors are not those of these layers."""
        if importlib.util.find_spec("peft") is None:
            raise MissingExtra("model.lora_rank", "peft", "lora")
        from peft import LoraConfig, inject_adapter_in_model
        from peft.tuners.lora import LoraLayer

        parts = {name.split(".")[0] for name, _ in model.named_parameters()}
        heads = sorted(parts - {model.base_model_prefix}) if head is not Head.LANGUAGE_MODEL else []
        options: dict[str, Any] = {
            "r": config.lora_rank, "lora_alpha": config.lora_alpha, "target_modules": config.target_modules
        }  # fmt: skip
        if config.lora_adapter_path is not None:
            options = read_adapter(config.lora_adapter_path, "model.lora_adapter_path")
        asked = f"model.target_modules={options['target_modules']}"
        if config.lora_adapter_path is None and not isinstance(config.target_modules, str):
            _check_names(model, config.target_modules, asked)
        options["exclude_modules"] = options.get("exclude_modules") or heads or None
        if options["target_modules"] == "all-linear":
            options["target_modules"] = linear_layers(model)
        self._config = LoraConfig(**options)
        try:
            inject_adapter_in_model(self._config, model)
        except ValueError as error:
            raise ConfigError(
                f"{asked} does not fit the model: {error} Name a list such as [q_proj,v_proj], or all-linear"
            ) from error
        self._layers: dict[str, Any] = {n: layer for n, layer in model.named_modules() if isinstance(layer, LoraLayer)}
        output = model.get_output_embeddings()
        for name, layer in self._layers.items():
            if type(layer.get_base_layer()) is not nn.Linear or layer is output or name in heads:
                raise ConfigError(
                    f"{asked} names {name}, which is not a linear layer inside the model; "
                    "name projections such as q_proj, or all-linear"
                )
        for name, parameter in model.named_parameters():
            if name.split(".")[0] in heads:
                parameter.requires_grad_(True)
        self._config.modules_to_save = heads or None
        self._config.target_modules = sorted(self._layers)
        self._config.base_model_name_or_path = config.path
        learns = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        for parameter in learns.values():
            parameter.data = parameter.data.float()  # peft makes them in the type of the model
        self.trained = list(learns)
        """The names, in the model, of what learns, in float32."""
        path = config.lora_adapter_path
        self.values = self._draw(model, seed) if path is None else self._read(model, Path(path))
        """Name -> first value of every adapter weight, the same on every rank; of a head too where the adapter has one."""

    def merged(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, W + s B A) from the model's own names and whole tensors, in the model's order, all in float32."""
        base: Tensor | None = None
        down: Tensor | None = None
        for name, tensor in tensors:
            layer, _, rest = name.partition(".base_layer.")
            tensor = tensor.float() if tensor.is_floating_point() else tensor
            if rest == "weight":
                base = tensor
            elif ".lora_A." in name:
                down = tensor
            elif ".lora_B." in name:
                assert base is not None, f"{name} comes without its base"
                assert down is not None, f"{name} comes without its other half"
                layer = name.partition(".lora_B.")[0]
                yield f"{layer}.weight", torch.addmm(base, tensor, down, alpha=self._layers[layer].scaling["default"])
                base = down = None
            else:
                yield base_name(name), tensor

    def round_base(self, model: nn.Module, dtype: torch.dtype) -> None:
        """Keep what does not learn in the type of the computation, in place: its passes round it to that in any case."""
        for parameter in model.parameters():
            if not parameter.requires_grad:
                parameter.data = parameter.data.to(dtype)

    def adapt(self, decoder: nn.Module) -> None:
        """Give a plain tree of modules over the same model the adapters too; `adapted.unmerged` names its weights."""
        adapt(decoder, self._layers)

    @contextmanager
    def off(self) -> Iterator[None]:
        """Inside, the model computes without its adapters."""
        for layer in self._layers.values():
            layer._disable_adapters = True
        try:
            yield
        finally:
            for layer in self._layers.values():
                layer._disable_adapters = False

    def save_config(self, folder: Path) -> None:
        """Write adapter_config.json."""
        self._config.save_pretrained(str(folder))

    def _draw(self, model: nn.Module, seed: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        values = {}
        for name, parameter in model.named_parameters():
            if ".lora_A." in name:
                bound = 1 / math.sqrt(parameter.shape[1])
                values[name] = torch.empty(parameter.shape).uniform_(-bound, bound, generator=generator)
            elif ".lora_B." in name:
                values[name] = torch.zeros(parameter.shape)
        return values

    def _read(self, model: nn.Module, folder: Path) -> dict[str, Tensor]:
        """The adapter's own values. A head that it does not have stays as the model has it."""
        files = WeightFiles(folder, ADAPTER_WEIGHTS)
        wanted = {adapter_name(name): name for name in self.trained}
        shapes = {file_name: tuple(model.get_parameter(name).shape) for file_name, name in wanted.items()}
        for name in sorted(files.shapes.keys() | {name for name in wanted if is_adapter(name)}):
            if files.shapes.get(name) != shapes.get(name):
                raise DataError(
                    f"model.lora_adapter_path={folder} does not fit the model: {name} has shape {files.shapes.get(name, 'none')} there "
                    f"and {shapes.get(name, 'none')} here; set model.path to the model that the adapter was trained beside"
                )
        return {wanted[name]: files.read(name, 0, shape[0]) for name, shape in files.shapes.items()}


def _check_names(model: PreTrainedModel, names: Iterable[str], asked: str) -> None:
    """Raise ConfigError for a name that no module has: peft leaves it out without a word while another is found."""
    modules, output = dict(model.named_modules()), model.get_output_embeddings()
    for name in names:
        if not any(path == name or path.endswith(f".{name}") for path in modules):
            linear = [path for path, module in modules.items() if isinstance(module, nn.Linear) and module is not output]
            known = ", ".join(dict.fromkeys(path.rpartition(".")[2] for path in linear))
            raise ConfigError(f"{asked} names {name}, which no layer of the model is called; its linear layers are {known}")


def linear_layers(model: PreTrainedModel) -> str | list[str]:
    """What all-linear is in this model. In a mixture of experts the names of the linear layers of attention and of shared experts.

    Its routers and its experts, which are parameters of three dimensions and no layers, stay as they are, though peft would adapt them;
    and so do MLPs of layers without experts, whose names peft takes for those of experts.
    """
    if model.config.model_type not in FAMILIES:
        return "all-linear"
    linear = (name for name, layer in model.named_modules() if isinstance(layer, nn.Linear))
    return [name for name in linear if ".self_attn." in name or ".shared_expert" in name]


class AdaptedSource(WeightSource):
    """What fills a model with adapters: the weights of the model under its own names, and the adapters' first values."""

    def __init__(self, base: WeightSource, values: dict[str, Tensor]) -> None:
        self._base, self._values = base, values

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Rows `start` to `stop` of a parameter, in float32 on the CPU."""
        return self._values[name][start:stop] if name in self._values else self._base.read(base_name(name), start, stop)


def base_name(name: str) -> str:
    """The Hugging Face name of a weight of a layer that may be adapted."""
    return name.replace(".base_layer.", ".")


def is_adapter(name: str) -> bool:
    """Whether a parameter of the model belongs to an adapter."""
    return ".lora_A." in name or ".lora_B." in name


def adapter_name(name: str) -> str:
    """The name of a trained weight in peft's file."""
    return _PREFIX + name.replace(".default.", ".")
