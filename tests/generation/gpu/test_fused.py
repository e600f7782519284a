"""The fused decoder in Triton's interpreter (see test_kernels.py) against transformers: token after token, in float32."""

import os
from types import SimpleNamespace

import pytest
import torch
from helpers.mixtures import MIXTURES, chosen_experts
from helpers.tiny import tiny_model
from torch import nn

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1 from the start: triton reads it when it is imported", allow_module_level=True)

from lockstep.generation.gpu.attention import decode_slots
from lockstep.generation.gpu.fused import FusedDecoder, fuse_projections
from lockstep.generation.model_support import cache_shape
from lockstep.generation.pages import KVCache
from lockstep.models.attention import CACHED
from lockstep.models.load import share_structure
from lockstep.models.lora import AdaptedLinear, add_adapters
from lockstep.models.routers import NOT_RECORDED

FAMILIES = ["llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe"]


def put_adapters(model, rank):
    """Adapters that do something beside q_proj, v_proj, o_proj and the MLP: not all layers of an input have one."""
    named = {
        n: m for n, m in model.named_modules() if type(m) is nn.Linear and n.endswith(("q_proj", "v_proj", "o_proj", "up_proj"))
    }
    add_adapters(model, {name: SimpleNamespace(r={"default": rank}, scaling={"default": 1.5}) for name in named})
    for part in model.modules():
        if isinstance(part, AdaptedLinear):
            part.lora_A = nn.Parameter(torch.randn(rank, part.in_features) / 8, requires_grad=False)
            part.lora_B = nn.Parameter(torch.randn(part.out_features, rank) / 8, requires_grad=False)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("adapters", [False, True], ids=["plain", "adapters"])
@torch.no_grad()
def test_every_token_gets_transformers_logits_and_its_experts(family, adapters):
    torch.manual_seed(0)
    model = tiny_model(family, **MIXTURES.get(family, {}))
    if adapters:
        put_adapters(model, 3)
    cache = KVCache(cache_shape(share_structure(model, CACHED), 16), 8, torch.device("cpu"))
    is_mixture = family in MIXTURES
    if is_mixture:
        cache.experts = torch.full((8, 16, 2, 2), NOT_RECORDED, dtype=torch.int16)
    fuse_projections(model)
    decoder = FusedDecoder(model, cache, 64)
    ids = torch.randint(2, 32, (3, 2))
    want = model(ids).logits
    table = torch.tensor([[1], [5], [3]], dtype=torch.int32)
    for place in range(2):
        context = torch.full((3,), place, dtype=torch.int32)
        positions, slots = decode_slots(table, context, 16)
        got = decoder.decode(ids[:, place], positions, slots, table, context, None)
        torch.testing.assert_close(got, want[:, place], atol=2e-5, rtol=1e-4)
    if is_mixture:
        for row, page in enumerate(table[:, 0].tolist()):
            assert torch.equal(cache.experts[page, :2].flatten(1), chosen_experts(model, ids[row]))
            assert (cache.experts[page, 2:] == NOT_RECORDED).all()
