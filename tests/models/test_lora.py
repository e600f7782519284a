from __future__ import annotations

import pytest
import torch
from helpers.tiny import tiny_model
from torch import nn

from lockstep.config.engine import ModelConfig
from lockstep.models.load import Head, share_structure
from lockstep.models.lora import AdaptedLinear, Lora, unmerged

pytest.importorskip("peft")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_an_adapted_model_computes_what_pefts_does_to_the_bit(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = tiny_model("qwen2").to(dtype).eval()
    decoder = share_structure(model, "eager")
    config = ModelConfig(path="x", lora_rank=3, lora_alpha=5, target_modules=["q_proj", "down_proj"])
    lora = Lora(model, config, Head.LANGUAGE_MODEL, seed=0)
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            parameter.data = torch.randn(parameter.shape).to(dtype)
    lora.adapt(decoder)
    weights = dict(unmerged(model.named_parameters()))
    assert weights.keys() == dict(decoder.named_parameters()).keys()
    for name, tensor in weights.items():
        parent, _, attribute = name.rpartition(".")
        setattr(decoder.get_submodule(parent), attribute, nn.Parameter(tensor, requires_grad=False))
    assert sum(isinstance(part, AdaptedLinear) for part in decoder.modules()) == 2 * model.config.num_hidden_layers
    model.set_attn_implementation("eager")
    ids = torch.tensor([[3, 4, 5, 9, 7]])
    assert torch.equal(decoder(ids).logits, model(ids).logits)
