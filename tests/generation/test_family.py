"""Keys and values in fewer bits: what cannot keep them is refused by one line that names the key, before anything is loaded if possible."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.families import FAMILIES as SETTINGS
from helpers.tiny import save_tiny_model, tiny_config, tiny_model

from lockstep.config import load_config
from lockstep.config.actor_rollout_ref import RolloutConfig
from lockstep.errors import ConfigError
from lockstep.generation.family import FAMILIES, MIXTURES, check_small_cache, check_small_cache_config
from lockstep.trainer.run.setup import check_engines
from lockstep.workers.rollout.registry import make_rollout

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
