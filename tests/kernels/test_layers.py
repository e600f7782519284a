"""The kernels of fast layers in Triton's interpreter, with and without adapters; tests/gpu/test_fast_layers.py has the compiled ones.

They need the package triton: TRITON_INTERPRET=1 pytest tests/kernels/test_layers.py
"""

from __future__ import annotations

import copy
import os

import pytest
import torch
import torch.nn.functional as F
from helpers.tiny import tiny_model
from torch import Tensor

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1 from the start: triton reads it when it is imported", allow_module_level=True)

from lockstep.kernels.layers import GatedMLP, Project
from lockstep.models import fast_layers
from lockstep.models.attention import PACKED, PackedLayout

MIXTURES = {
    "mixtral": {"num_local_experts": 6, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8, "norm_topk_prob": True},
}


@pytest.mark.parametrize("adapters", [False, True], ids=["plain", "adapters"])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe"])
def test_in_float32_layers_and_gradients_are_transformers_own(family: str, adapters: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = tiny_model(family, **MIXTURES.get(family, {}))
    model.set_attn_implementation(PACKED)
    if adapters:
        peft = pytest.importorskip("peft")
        targets = ["q_proj", "o_proj"] if family in MIXTURES else "all-linear"
        peft.inject_adapter_in_model(peft.LoraConfig(r=8, lora_alpha=12, target_modules=targets), model)
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                torch.nn.init.normal_(parameter, std=0.05)
    lengths = torch.tensor([5, 9])
    ids = torch.randint(0, 32, (1, 14))
    positions = torch.cat([torch.arange(n) for n in lengths.tolist()])[None]

    def run(fast: bool) -> list[torch.Tensor]:
        mine = copy.deepcopy(model)
        if fast:
            monkeypatch.setattr(fast_layers, "_fits", lambda weight: True)
            for part in (type(mine.model.layers[0]), type(mine.model.layers[0].mlp), type(mine.model.norm)):
                monkeypatch.setattr(part, "forward", None)  # what is compared is not transformers' own code again
            assert fast_layers.install_fast_layers(mine)
        logits = mine(input_ids=ids, position_ids=positions, use_cache=False, layout=PackedLayout(lengths, "cpu")).logits
        logits.square().mean().backward()
        return [logits.detach(), *(p.grad for p in mine.parameters() if p.requires_grad)]

    for own, kernels in zip(run(False), run(True), strict=True):
        assert (own - kernels).abs().max() <= 1e-5 * own.abs().max()


@pytest.mark.parametrize("most", [0, 1 << 16], ids=["sorted", "counted"])
def test_pairs_of_an_expert_lie_together_in_the_order_of_their_tokens(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from lockstep.kernels import experts as expert_kernels

    monkeypatch.setattr(expert_kernels, "_MOST_COUNTED", most)
    torch.manual_seed(0)
    chosen = torch.stack([torch.randperm(7)[:3] for _ in range(900)])
    chosen[chosen == 4] = 6  # an expert without a token
    token, place, ends = expert_kernels.pairs_of(chosen, 8)
    want = sorted((int(expert), number, column) for number, row in enumerate(chosen) for column, expert in enumerate(row))
    assert token.tolist() == [number for _, number, _ in want]
    assert [int(place[number, column]) for _, number, column in want] == list(range(2700))
    assert ends.tolist() == [int((chosen <= expert).sum()) for expert in range(8)]


def assert_close(mine: list[Tensor], want: list[Tensor]) -> None:
    """float32, sums in another order: 1e-6 of the largest."""
    for a, b in zip(mine, want, strict=True):
        assert (a - b).abs().max() < 1e-6 * b.abs().max()


@pytest.mark.parametrize("width", [40, 96, 256, 1000])
def test_a_gated_mlp_and_its_gradients_are_those_of_its_formula(width: int) -> None:
    torch.manual_seed(0)
    shapes = (37, 24), (width, 24), (width, 24), (24, width)
    x, gate, up, down = leaves = [torch.randn(*shape, requires_grad=True) for shape in shapes]
    weights = torch.randn(37, 24)
    mine = GatedMLP.apply(None, x, (1.0,) * 3, *(t for weight in (gate, up, down) for t in (weight, None, None, None)))
    want = (F.silu(x @ gate.t()) * (x @ up.t())) @ down.t()
    assert_close(
        [mine, *torch.autograd.grad((mine * weights).sum(), leaves)], [want, *torch.autograd.grad((want * weights).sum(), leaves)]
    )


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("frozen", [True, False])
def test_projections_of_one_input_are_those_of_each_weight(bias: bool, frozen: bool) -> None:
    """`frozen`: with the second weight, and its bias, out of training."""
    torch.manual_seed(0)
    x = torch.randn(37, 24, requires_grad=True)
    pairs = [(torch.randn(n, 24), torch.randn(n) if bias else None) for n in (32, 16, 8)]
    leaves = [x]
    for number, pair in enumerate(pairs):
        leaves += [p.requires_grad_() for p in pair if p is not None and not (frozen and number == 1)]
    mine = Project.apply(x, (1.0,) * 3, *(p for pair in pairs for p in (*pair, None, None)))
    want = [F.linear(x, *pair) for pair in pairs]
    weights = [torch.randn_like(y) for y in want]
    gradients = [
        torch.autograd.grad(sum((y * w).sum() for y, w in zip(found, weights, strict=True)), leaves) for found in (mine, want)
    ]
    assert_close([*mine, *gradients[0]], [*want, *gradients[1]])
