"""Load a Hugging Face model with the head that a role needs."""

from __future__ import annotations

import copy
from enum import Enum

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedModel,
)

from lockstep.config.engine import ModelConfig
from lockstep.errors import ConfigError, DataError
from lockstep.models.attention import PACKED
from lockstep.utils.hf_config import read_model_config


class Head(Enum):
    """What the model puts on top of its hidden states."""

    LANGUAGE_MODEL = AutoModelForCausalLM
    """Logits over the vocabulary: actor, reference, rollout."""
    VALUE = AutoModelForTokenClassification
    """One number a token (token classification with one label): critic."""
    SCORE = AutoModelForSequenceClassification
    """One number a sequence (sequence classification with one label): reward model."""


def load_model(config: ModelConfig, head: Head, seed: int, pad_token_id: int | None = None) -> PreTrainedModel:
    """The model in float32 on the CPU, without dropout, in training mode, with our packed attention (a score head pads instead).

    A value head that the folder does not have is drawn from `seed`, so that every rank has the same one. Any other weight that is missing
    or of another shape raises DataError, as does a folder that is not a model or has no such head in transformers.
    """
    assert config.path is not None, "the composition root fills in a path"
    overrides = dict(config.override_config)
    if head is not Head.LANGUAGE_MODEL:
        overrides["num_labels"] = 1
    hf_config = read_model_config(config.path, config.trust_remote_code, **overrides)
    if pad_token_id is not None:
        hf_config.pad_token_id = pad_token_id
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            model, report = head.value.from_pretrained(
                config.path,
                config=hf_config,
                dtype=torch.float32,
                attn_implementation="sdpa" if head is Head.SCORE else PACKED,
                trust_remote_code=config.trust_remote_code,
                output_loading_info=True,
            )
        except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
            first = str(error).strip().splitlines()[0]
            raise DataError(f"the weights of {config.path} cannot be loaded as {head.name.lower()}: {first}") from error
    # transformers draws what it does not find; only a new value head is meant to be drawn.
    missing = [n for n in report["missing_keys"] if head is not Head.VALUE or n.startswith(f"{model.base_model_prefix}.")]
    if missing:
        raise DataError(
            f"the weights of {config.path} are incomplete for {head.name.lower()}: {len(missing)} missing, first {sorted(missing)[:3]}; "
            "is it the right kind of model?"
        )
    _disable_dropout(model)
    if config.enable_gradient_checkpointing:
        if not model.supports_gradient_checkpointing:
            raise ConfigError(
                f"{type(model).__name__} has no gradient checkpointing; set model.enable_gradient_checkpointing=false"
            )
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.train()


def share_structure(model: PreTrainedModel, attention: str) -> PreTrainedModel:
    """A second module tree over the SAME parameters, with another attention function: training and decoding from one set of weights."""
    memo = {id(parameter): parameter for parameter in model.parameters()}
    twin = copy.deepcopy(model, memo)
    twin.gradient_checkpointing_disable()
    twin.set_attn_implementation(attention)
    return twin.eval()


def _disable_dropout(model: nn.Module) -> None:
    """What was sampled must be what is trained: dropout would make them two policies."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name in ("attention_dropout", "dropout_p"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
