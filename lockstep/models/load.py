"""Load a Hugging Face model with the head that a role needs."""

from __future__ import annotations

import copy
from enum import Enum

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedModel,
)

from lockstep.config.engine import ModelConfig
from lockstep.errors import ConfigError, DataError
from lockstep.models.attention import PACKED, PackedLayout
from lockstep.utils.hf_config import read_model_config
from lockstep.utils.model_source import model_folder
from lockstep.utils.quiet import quiet_transformers


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
    with torch.random.fork_rng(devices=[]), quiet_transformers():
        torch.manual_seed(seed)
        try:
            model, report = head.value.from_pretrained(
                model_folder(config.path),
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
    if head is not Head.SCORE:
        _check_packing(model, config.path)
    return model.train()


def share_structure(model: PreTrainedModel, attention: str) -> PreTrainedModel:
    """A second module tree over the SAME parameters, with another attention function: training and decoding from one set of weights."""
    memo = {id(parameter): parameter for parameter in model.parameters()}
    twin = copy.deepcopy(model, memo)
    # Families with soft-capped scores or sinks have no fused function of transformers' own.
    twin.set_attn_implementation("eager" if attention == "sdpa" and not model._supports_sdpa else attention)
    return twin.eval()


@torch.no_grad()
def _check_packing(model: PreTrainedModel, path: str) -> None:
    """Raise ConfigError unless two packed rows, whole and with their prompt shared, give what each gives alone with transformers' own
    attention.

    transformers leaves the mask to our attention function, so a family with another kind of attention (linear, ALiBi) would be computed
    wrongly and without a word.
    """
    generator = torch.Generator().manual_seed(0)
    prompt, one, two = (torch.randint(0, model.config.get_text_config().vocab_size, (n,), generator=generator) for n in (3, 4, 2))
    whole, other = torch.cat([prompt, one]), torch.cat([prompt, two])
    model.eval()
    advice = "choose a model with causal softmax attention that goes through transformers' attention interface"
    try:
        packed = _packed_logits(model, [whole, other], [0, 0], PackedLayout(torch.tensor([7, 5])))
        shared = _packed_logits(model, [prompt, one, two], [0, 3, 3], PackedLayout(torch.tensor([3, 4, 2]), followers=[2]))
        plain = share_structure(model, "sdpa")
        alone = torch.cat([plain(input_ids=row[None], use_cache=False).logits[0] for row in (whole, other)])
        difference = max((packed - alone).abs().max().item(), (shared - torch.cat([alone[:7], alone[10:]])).abs().max().item())
    except ConfigError:
        raise
    except (TypeError, ValueError, KeyError) as error:
        raise ConfigError(f"{type(model).__name__} ({path}) cannot compute packed rows ({error}); {advice}") from error
    scale = alone.abs().max().item()
    if not difference <= 1e-3 * scale:
        raise ConfigError(
            f"{type(model).__name__} ({path}) attends in a way that packed rows do not reproduce: logits up to {scale:.2g} differ by "
            f"{difference:.2g}; {advice}"
        )


def _packed_logits(model: PreTrainedModel, segments: list[Tensor], first_positions: list[int], layout: PackedLayout) -> Tensor:
    positions = torch.cat([start + torch.arange(len(ids)) for start, ids in zip(first_positions, segments, strict=True)])
    inputs = {"input_ids": torch.cat(segments)[None], "position_ids": positions[None], "use_cache": False}
    return model(**inputs, layout=layout).logits[0]


def _disable_dropout(model: nn.Module) -> None:
    """What was sampled must be what is trained: dropout would make them two policies."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name in ("attention_dropout", "dropout_p"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
