"""Tiny models of real architectures, with weights that are not all alike, written as Hugging Face folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    PreTrainedModel,
)

from lockstep.embedded.task import make_tokenizer

_SHAPE: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
}


def tiny_config(model_type: str = "llama", **changes: Any) -> Any:
    """The config of a model with two layers and 32 tokens."""
    extra = {"head_dim": 8} if model_type == "qwen3" else {}
    return AutoConfig.for_model(model_type, **_SHAPE | extra | changes)


def tiny_model(
    model_type: str = "llama", seed: int = 0, score_head: bool = False, value_head: bool = False, **changes: Any
) -> PreTrainedModel:
    """Random float32 weights from `seed`, larger than the default ones, so that outputs differ visibly."""
    factory = AutoModelForCausalLM
    if score_head or value_head:
        factory = AutoModelForSequenceClassification if score_head else AutoModelForTokenClassification
        changes["num_labels"] = 1
    config = tiny_config(model_type, **changes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = factory.from_config(config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


def save_tiny_model(folder: Path, model_type: str = "llama", seed: int = 0, **changes: Any) -> str:
    """Write a tiny model with the embedded task's tokenizer; returns the path."""
    tiny_model(model_type, seed, **changes).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return str(folder)


def perturbed(source: Path, folder: Path, size: float = 0.05, seed: int = 0) -> Path:
    """The model of `source` with other weights, as far away as noise of this size, and its tokenizer; returns `folder`."""
    model = AutoModelForCausalLM.from_pretrained(source)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * size)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)
    return folder
