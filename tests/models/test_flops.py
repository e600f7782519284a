"""Operations counted by formula, against torch's own count of what a forward and backward pass did."""

import pytest
import torch
from helpers.families import FAMILIES
from helpers.tiny import tiny_config, tiny_model
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from lockstep.models.flops import mlp_width, model_cost, peak_flops, visible_pairs


@given(length=st.integers(0, 12), window=st.none() | st.integers(1, 14))
def test_visible_pairs_equal_a_loop(length: int, window: int | None) -> None:
    pairs = sum(1 for query in range(length) for key in range(query + 1) if window is None or query - key < window)
    assert visible_pairs(length, window) == pairs


def counted(model: torch.nn.Module, length: int, keep: int, backward: bool) -> int:
    ids = torch.arange(2, 2 + length)[None]
    with FlopCounterMode(display=False) as counter:
        out = model(input_ids=ids, use_cache=False, logits_to_keep=keep).logits
        if backward:
            out.sum().backward()
    # Angles of positions are a product of matrices in some versions of transformers.
    angles = sum(sum(counts.values()) for name, counts in counter.get_flop_counts().items() if name.endswith(".rotary_emb"))
    return counter.get_total_flops() - angles


DENSE = [name for name in FAMILIES if name not in ("qwen2_moe", "qwen3_moe", "mixtral", "olmoe", "gpt_oss", "deepseek_v3", "gpt2")]


@pytest.mark.parametrize("family", DENSE)
def test_the_count_equals_what_torch_counts(family: str) -> None:
    """torch counts every pair of tokens in attention, seen or not: the difference is the pairs that are masked."""
    model = tiny_model(family, **FAMILIES[family])
    model.set_attn_implementation("eager")
    cost, length, keep = model_cost(model), 9, 4
    masked = sum(length**2 - visible_pairs(length, window) for window in cost.windows)
    assert counted(model, length, keep, backward=False) - 2 * cost.widths * masked == cost.forward([length], keep)


def test_training_costs_three_forward_passes() -> None:
    model = tiny_model("llama")
    model.set_attn_implementation("eager")
    cost = model_cost(model)
    masked = sum(81 - visible_pairs(9, window) for window in cost.windows)
    assert counted(model, 9, 4, backward=True) - 6 * cost.widths * masked == cost.training([9], 4)


def test_the_mlp_of_a_mixture_is_as_wide_as_the_experts_of_a_token() -> None:
    assert mlp_width(tiny_config()) == 48
    assert mlp_width(tiny_config("mixtral", num_local_experts=8, num_experts_per_tok=3)) == 3 * 48
    experts = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 10}
    assert mlp_width(tiny_config("qwen3_moe", **experts)) == 30
    assert mlp_width(tiny_config("qwen2_moe", **experts, shared_expert_intermediate_size=7)) == 37


def test_of_the_experts_only_those_that_a_token_takes_count() -> None:
    two, four = (model_cost(tiny_model("mixtral", num_local_experts=n, num_experts_per_tok=2)) for n in (4, 8))
    router = 4 * 32 * 2  # four more rows in the router of each of two layers
    assert four.body - two.body == router
    one = model_cost(tiny_model("mixtral", num_local_experts=4, num_experts_per_tok=1))
    assert two.body - one.body == 2 * 3 * 32 * 48


@pytest.mark.parametrize(
    ("name", "peak"), [("NVIDIA H200", 989e12), ("NVIDIA A100-SXM4-80GB", 312e12), ("NVIDIA B200", 2.25e15), ("NVIDIA H20", None)]
)
def test_a_device_that_is_not_known_has_no_peak(name: str, peak: float | None) -> None:
    assert peak_flops(name) == peak
