"""Norms, rotary positions and gates as kernels against transformers' own code in float32."""

import copy
import functools
from typing import Any

import pytest
import torch
from helpers.tiny import tiny_model
from transformers import PreTrainedModel

from lockstep.models.attention import PACKED, PackedLayout
from lockstep.models.fast_layers import install_fast_layers
from lockstep.models.routers import RouterOutput, replayed, routers

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


MIXTURES = {
    "mixtral": {"num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": None},
    "qwen3_moe": {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "norm_topk_prob": True},
}


def adapt(model: PreTrainedModel) -> None:
    """Adapters of peft that do something, beside some of the linear layers; nothing else learns."""
    peft = pytest.importorskip("peft")
    targets = ["q_proj", "o_proj"] if hasattr(model.model.layers[0].mlp, "experts") else "all-linear"
    peft.inject_adapter_in_model(peft.LoraConfig(r=8, lora_alpha=12, target_modules=targets), model)
    for name, parameter in model.named_parameters():
        if ".lora_B." in name:
            torch.nn.init.normal_(parameter, std=0.05)


@pytest.mark.parametrize("adapters", [False, True], ids=["plain", "adapters"])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe"])
def test_layers_are_as_near_float32_as_transformers_own_in_bfloat16(
    family: str, adapters: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits and every gradient, relative to the largest: the kernels round once where transformers rounds after each operation."""
    torch.manual_seed(0)
    model = tiny_model(
        family, hidden_size=256, head_dim=64, num_attention_heads=4, num_key_value_heads=2, intermediate_size=512,
        **MIXTURES.get(family, {}),
    )  # fmt: skip
    model.set_attn_implementation(PACKED)
    if adapters:
        adapt(model)
    lengths = torch.tensor([40, 300, 100])
    ids = torch.randint(0, model.config.vocab_size, (1, 440), device="cuda")
    positions = torch.cat([torch.arange(n) for n in lengths.tolist()])[None].cuda()

    chosen: dict[int, torch.Tensor] = {}

    def run(dtype: torch.dtype, fast: bool) -> list[torch.Tensor]:
        mine = copy.deepcopy(model).to("cuda", dtype)
        for number, router in enumerate(routers(mine)):
            router.register_forward_hook(functools.partial(choose_as_before, number))
        if fast:
            for part in (type(mine.model.layers[0]), type(mine.model.layers[0].mlp), type(mine.model.norm)):
                monkeypatch.setattr(part, "forward", None)  # what is compared is not transformers' own code again
            assert install_fast_layers(mine)
        layout = PackedLayout(lengths, "cuda")
        logits = mine(input_ids=ids, position_ids=positions, use_cache=False, layout=layout).logits
        (logits.float().square() * torch.linspace(0, 1, logits.shape[-1], device="cuda")).mean().backward()
        return [logits.float(), *(p.grad.float() for p in mine.parameters() if p.requires_grad)]

    def choose_as_before(number: int, router: torch.nn.Module, args: Any, output: RouterOutput) -> RouterOutput:
        """A rounding error must not send a token to another expert: all choose as in float32, which comes first."""
        return replayed(router, output, chosen.setdefault(number, output[2]))

    exact, plain, fast = run(torch.float32, False), run(torch.bfloat16, False), run(torch.bfloat16, True)
    errors = [[((a - b).abs().max() / b.abs().max()).item() for a, b in zip(x, exact, strict=True)] for x in (plain, fast)]
    for own, kernels in zip(*errors, strict=True):
        assert kernels <= 1.5 * own + 0.005
    assert sum(errors[1]) <= 1.05 * sum(errors[0])
