"""LoRA through peft: a small product of two matrices beside each linear layer is trained, the model itself stays as it is.

An adapted layer computes W x + s B (A x) with s = lora_alpha / lora_rank. A [r, in] is drawn uniformly from +-1/sqrt(in), B [out, r]
starts at 0, so that training starts from the model; or both come from a folder that peft wrote (model.lora_adapter_path). Outside the
engine and its decoder (`AdaptedLinear`) nothing knows of adapters: exported weights are W + s B A under their Hugging Face names. A value
or score head is trained whole.
"""

import importlib.util
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from lockstep.config.engine import ADAPTER_WEIGHTS, ModelConfig, read_adapter
from lockstep.errors import ConfigError, DataError, MissingExtra
from lockstep.models.load import Head
from lockstep.models.routers import FAMILIES
from lockstep.models.weight_files import WeightFiles, WeightSource

ADAPTER = "adapter"
"""The folder of a checkpoint with the adapter in peft's format."""
_PREFIX = "base_model.model."
"""What peft puts before every name in a file."""


class Lora:
    """The adapters of one model; making it puts them into the model, and leaves nothing else to train but a value or score head."""

    def __init__(self, model: PreTrainedModel, config: ModelConfig, head: Head, seed: int, key: str = "model") -> None:
        """`key` is the place of `config` in the configuration.

        Raise MissingExtra without peft, ConfigError if target_modules names something that is not a linear layer inside the model, and
        DataError if the tensors of an adapter to start from are not for these layers.
        """
        if importlib.util.find_spec("peft") is None:
            raise MissingExtra(f"{key}.lora_rank", "peft", "lora")
        from peft import LoraConfig, inject_adapter_in_model
        from peft.tuners.lora import LoraLayer

        parts = {name.split(".")[0] for name, _ in model.named_parameters()}
        heads = sorted(parts - {model.base_model_prefix}) if head is not Head.LANGUAGE_MODEL else []
        options: dict[str, Any] = {
            "r": config.lora_rank, "lora_alpha": config.lora_alpha, "target_modules": config.target_modules
        }  # fmt: skip
        asked = f"{key}.target_modules={options['target_modules']}"
        advice = "name projections such as q_proj, or all-linear"
        if config.lora_adapter_path is not None:
            options = read_adapter(config.lora_adapter_path, f"{key}.lora_adapter_path")
            asked = f"{key}.lora_adapter_path={config.lora_adapter_path} with target_modules={options['target_modules']}"
            advice = f"merge the adapter into its model with peft (merge_and_unload) and start from that with {key}.path"
        elif config.target_modules != "all-linear":
            _check_names(model, config.target_modules, heads, asked)
        options["exclude_modules"] = options.get("exclude_modules") or heads or None
        if options["target_modules"] == "all-linear":
            options["target_modules"] = linear_layers(model)
        self._config = LoraConfig(**options)
        try:
            inject_adapter_in_model(self._config, model)
        except ValueError as error:
            reason = str(error).splitlines()[0].rstrip(".(")
            raise ConfigError(f"{asked} does not fit the model: {reason}; {advice}") from error
        self._layers: dict[str, Any] = {n: layer for n, layer in model.named_modules() if isinstance(layer, LoraLayer)}
        output = model.get_output_embeddings()
        for name, layer in self._layers.items():
            if type(layer.get_base_layer()) is not nn.Linear or layer is output or name in heads:
                raise ConfigError(f"{asked} names {name}, which is not a linear layer inside the model; {advice}")
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
        self._shapes = {name: tuple(parameter.shape) for name, parameter in learns.items()}
        self._seed = seed
        self._files: WeightFiles | None = None
        if config.lora_adapter_path is not None:
            self._files = WeightFiles(Path(config.lora_adapter_path), ADAPTER_WEIGHTS)
            self._check_shapes(self._files.shapes, f"{key}.lora_adapter_path={config.lora_adapter_path}", f"{key}.path")

    @cached_property
    def values(self) -> dict[str, Tensor]:
        """Name -> first value of every adapter weight, the same on every rank; of a head too if the adapter has one.

        A head that the adapter lacks stays as the model has it.
        """
        if self._files is None:
            return self._draw()
        names = {adapter_name(name): name for name in self.trained}
        return {names[name]: self._files.read(name, 0, shape[0]) for name, shape in self._files.shapes.items()}

    def merged(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield (Hugging Face name, W + s B A) from the model's own names and whole tensors, in the model's order, all in float32."""
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
        """Give a plain tree of modules over the same model the adapters too; `unmerged` names its weights."""
        add_adapters(decoder, self._layers)

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

    def _draw(self) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(self._seed)
        values = {}
        for name, shape in self._shapes.items():
            if ".lora_A." in name:
                bound = 1 / math.sqrt(shape[1])
                values[name] = torch.empty(shape).uniform_(-bound, bound, generator=generator)
            elif ".lora_B." in name:
                values[name] = torch.zeros(shape)
        return values

    def _check_shapes(self, found: dict[str, tuple[int, ...]], asked: str, model_key: str) -> None:
        """Raise DataError unless the adapter has every tensor of these layers, and no other but a head's."""
        wanted = {adapter_name(name): shape for name, shape in self._shapes.items()}
        for name in sorted(found.keys() | {name for name in wanted if is_adapter(name)}):
            if found.get(name) != wanted.get(name):
                raise DataError(
                    f"{asked} does not fit the model: {name} has shape {found.get(name, 'none')} there and {wanted.get(name, 'none')} "
                    f"here; set {model_key} to the model that the adapter was trained beside"
                )


def _check_names(model: PreTrainedModel, names: Iterable[str], heads: list[str], asked: str) -> None:
    """Raise ConfigError for a name that no module has (peft ignores it if another name is found), or of a module without adapters."""
    inside = {
        path: type(module) is nn.Linear for path, module in model.named_modules() if module is not model.get_output_embeddings()
    }
    linear = [path for path, is_linear in inside.items() if is_linear and path not in heads]
    known = ", ".join(dict.fromkeys(path.rpartition(".")[2] for path in linear))
    for name in names:
        meant = [path for path, _ in model.named_modules() if path == name or path.endswith(f".{name}")]
        if not meant:
            raise ConfigError(f"{asked} names {name}, which no layer of the model is called; its linear layers are {known}")
        other = [path for path in meant if path not in linear]
        if other:
            raise ConfigError(f"{asked} names {other[0]}, which is not a linear layer inside the model; these are {known}")


def linear_layers(model: PreTrainedModel) -> str | list[str]:
    """Return what all-linear means for this model; in a mixture of experts the linear layers of attention and of shared experts.

    Its routers and its experts (parameters of three dimensions, not layers) stay as they are, though peft would adapt them. So do MLPs of
    layers without experts, whose names peft takes for names of experts.
    """
    if model.config.model_type not in FAMILIES:
        return "all-linear"
    linear = (name for name, layer in model.named_modules() if isinstance(layer, nn.Linear))
    return [name for name in linear if ".self_attn." in name or ".shared_expert" in name]


class AdaptedSource(WeightSource):
    """The values that fill a model with adapters: the weights of the model under its own names, and the adapters' first values."""

    def __init__(self, base: WeightSource, values: dict[str, Tensor]) -> None:
        self._base, self._values = base, values

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Rows `start` to `stop` of a parameter, in float32 on the CPU."""
        return self._values[name][start:stop] if name in self._values else self._base.read(base_name(name), start, stop)


def base_name(name: str) -> str:
    """Return the Hugging Face name of a weight of a layer that may have an adapter."""
    return name.replace(".base_layer.", ".")


def is_adapter(name: str) -> bool:
    """Whether a parameter of the model belongs to an adapter."""
    return ".lora_A." in name or ".lora_B." in name


def adapter_name(name: str) -> str:
    """Return the name of a trained weight in peft's file."""
    return _PREFIX + name.replace(".default.", ".")


# -- a decoder beside the trained model --------------------------------------------------------------------------------------


class AdaptedLinear(nn.Linear):
    """A linear layer with its adapter beside it, for a decoder that samples from the weights that train: W x + s B (A x).

    Merged into half-precision weights, an adapter would be rounded to their few bits, and the sampler would differ from the trainer by far
    more than by the rounding of activations. (cpu/linears.py, whose copy is float32, merges; gpu/low_rank.py computes both in one product.)
    """

    lora_A: nn.Parameter
    lora_B: nn.Parameter

    def __init__(self, linear: nn.Linear, rank: int, scaling: float) -> None:
        """Share weight and bias of `linear`, with room for A [rank, in] and B [out, rank]; `scaling` is s."""
        nn.Module.__init__(self)
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.scaling = scaling
        self.weight = linear.weight
        self.bias = linear.bias
        for name, shape in (("lora_A", (rank, self.in_features)), ("lora_B", (self.out_features, rank))):
            empty = torch.empty(shape, dtype=linear.weight.dtype, device="meta")
            self.register_parameter(name, nn.Parameter(empty, requires_grad=False))

    def forward(self, x: Tensor) -> Tensor:
        """Return W x + s B (A x), rounded where peft's layer rounds. (kernels/linear_parts.py rounds less, for layers of our kernels.)"""
        return F.linear(x, self.weight, self.bias) + self.delta(x)

    def delta(self, x: Tensor) -> Tensor:
        """Return s B (A x)."""
        return F.linear(F.linear(x, self.lora_A), self.lora_B) * self.scaling


def add_adapters(model: nn.Module, layers: dict[str, Any]) -> None:
    """Put an AdaptedLinear in the place of every linear layer of `model` that is among `layers` (of peft, by name)."""
    for name, layer in layers.items():
        parent, _, attribute = name.rpartition(".")
        linear = model.get_submodule(name)
        assert isinstance(linear, nn.Linear)
        adapted = AdaptedLinear(linear, layer.r["default"], layer.scaling["default"])
        setattr(model.get_submodule(parent), attribute, adapted)


def unmerged(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """(name in a model after `add_adapters`, tensor) from peft's names."""
    for name, tensor in tensors:
        for half in ("lora_A", "lora_B"):
            name = name.replace(f".{half}.default.weight", f".{half}")
        yield name.replace(".base_layer.", "."), tensor
