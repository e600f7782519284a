"""Norms, rotary positions and gates as kernels against transformers' own code in float32."""

import copy

import pytest
import torch
from helpers.tiny import tiny_model

from lockstep.models.attention import PACKED, PackedLayout
from lockstep.models.fast_layers import install_fast_layers

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_layers_are_as_near_float32_as_transformers_own_in_bfloat16(family: str) -> None:
    """Logits and every gradient, relative to the largest: the kernels round once where transformers rounds after each operation."""
    torch.manual_seed(0)
    model = tiny_model(family, hidden_size=256, head_dim=64, num_attention_heads=4, num_key_value_heads=2, intermediate_size=512)
    model.set_attn_implementation(PACKED)
    lengths = torch.tensor([40, 300, 100])
    ids = torch.randint(0, model.config.vocab_size, (1, 440), device="cuda")
    positions = torch.cat([torch.arange(n) for n in lengths.tolist()])[None].cuda()

    def run(dtype: torch.dtype, fast: bool) -> list[torch.Tensor]:
        mine = copy.deepcopy(model).to("cuda", dtype)
        if fast:
            assert install_fast_layers(mine)
        layout = PackedLayout(lengths, "cuda")
        logits = mine(input_ids=ids, position_ids=positions, use_cache=False, layout=layout).logits
        (logits.float().square() * torch.linspace(0, 1, logits.shape[-1], device="cuda")).mean().backward()
        return [logits.float(), *(p.grad.float() for p in mine.parameters())]

    exact, plain, fast = run(torch.float32, False), run(torch.bfloat16, False), run(torch.bfloat16, True)
    errors = [[((a - b).abs().max() / b.abs().max()).item() for a, b in zip(x, exact, strict=True)] for x in (plain, fast)]
    for own, kernels in zip(*errors, strict=True):
        assert kernels <= 1.5 * own + 0.005
    assert sum(errors[1]) <= 1.05 * sum(errors[0])
