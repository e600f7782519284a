"""EngineSpec: the model, the optimizer and the device of one training engine, and what every backend derives from them."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from transformers import PretrainedConfig, PreTrainedModel

from lockstep.config.engine import ModelConfig, OptimConfig
from lockstep.models.hf_config import read_model_config
from lockstep.models.load import Head, load_model, load_on_meta, share_structure, take_weights
from lockstep.models.recompute import choose_recompute, free_memory
from lockstep.models.weight_files import WeightSource


def compute_dtype(name: str, device: torch.device) -> torch.dtype:
    """The type of the computation: "auto" is bfloat16 on a GPU and float32 on a CPU."""
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]


@dataclass(frozen=True, kw_only=True)
class EngineSpec:
    """One model for one engine. The backend and its own section are said apart from it (config/engine.py: EngineChoice)."""

    model: ModelConfig
    head: Head
    optim: OptimConfig | None
    """None makes a frozen engine, which cannot learn."""
    total_updates: int
    device: torch.device
    seed: int
    """Draws adapters, and a head that the model's folder does not have: a value head, or a score head that learns."""
    pad_token_id: int | None = None
    decoder_attention: str | None = None
    """The attention function of `engine.decoder`, a module for generation; None where nothing generates."""
    max_tokens: int | None = None
    """Tokens of the largest micro-batch, where that is known: it decides how much model.recompute=auto recomputes."""

    def hf_config(self) -> PretrainedConfig:
        """What the model's folder says of itself. Raises DataError and ConfigError; see read_model_config."""
        return read_model_config(str(self.model.path), self.model.trust_remote_code, **self.model.override_config)

    def load(self) -> tuple[PreTrainedModel, WeightSource]:
        """The model on the meta device, and what fills it: its files, of which a rank reads what it keeps.

        Weights that cannot be read part by part are loaded whole, and given from memory. Raises DataError; see load_model.
        """
        found = load_on_meta(self.model, self.head, self.seed, self.pad_token_id, self.optim is not None)
        if found is not None:
            return found
        module = self.load_whole()
        return module, take_weights(module)

    def load_whole(self) -> PreTrainedModel:
        """The model with its weights, in float32 on the CPU. Raises DataError; see load_model."""
        return load_model(self.model, self.head, self.seed, self.pad_token_id, self.optim is not None)

    def recompute(self, module: PreTrainedModel, dtype: torch.dtype, fast: bool = False) -> str:
        """What of the activations is computed again, one of models/recompute.py's kinds: nothing in a model that does not learn.

        `dtype` is the type of the computation; `fast` says that the layers run as models/fast_layers.py.
        """
        if self.optim is None or not self.model.enable_gradient_checkpointing:
            return "none"
        if self.model.recompute != "auto":
            return self.model.recompute
        return choose_recompute(module, self.max_tokens, free_memory(self.device), dist.get_world_size(), dtype.itemsize, fast)

    def decoder(self, module: PreTrainedModel) -> PreTrainedModel | None:
        """A second tree of modules over the parameters of `module` for generation, where one was asked for."""
        return share_structure(module, self.decoder_attention) if self.decoder_attention else None
