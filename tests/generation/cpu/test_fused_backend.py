from pathlib import Path

import pytest
import torch
from helpers.families import FAMILIES
from helpers.rollouts import ids_of, make_requests, make_rollout, sampling
from helpers.tiny import save_tiny_model, tiny_model
from torch import nn

from benchmarks.one_by_one import OneByOne
from lockstep.generation.cpu import fused_backend
from lockstep.generation.cpu.kernels import Library


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3", "mistral"])
def test_the_compiled_layers_give_what_the_module_gives(
    tmp_path: Path, model_type: str, compiled: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens of the Hugging Face module's own layers, log-probs within 2e-5; with filters, which PyTorch draws with."""
    path = save_tiny_model(tmp_path, model_type, **FAMILIES[model_type])
    requests = make_requests(9)
    params = sampling(stop_token_ids=(), max_tokens=40, top_k=9)
    rollout = make_rollout(path)
    completions = rollout.generate(requests, params)
    assert isinstance(rollout.backend, fused_backend.FusedBackend)
    monkeypatch.setattr(fused_backend, "library", lambda: None)
    plain = make_rollout(path)
    expected = plain.generate(requests, params)
    assert not isinstance(plain.backend, fused_backend.FusedBackend)
    assert ids_of(completions) == ids_of(expected)
    for mine, theirs in zip(completions, expected, strict=True):
        torch.testing.assert_close(mine.log_probs, theirs.log_probs, atol=2e-5, rtol=0)


@pytest.mark.parametrize("has_pairs", [False, True])
@torch.no_grad()
def test_bfloat16_weights_give_what_the_same_numbers_give_in_float32(
    tmp_path: Path, compiled: Library, has_pairs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only keys and values are rounded, and with pairs what enters a product: log-probs of the same tokens within 0.02 of the rounded
    weights' float32 forward."""
    if has_pairs and not compiled.has_pairs:
        pytest.skip("this processor does not multiply bfloat16")
    monkeypatch.setattr(compiled, "has_pairs", has_pairs)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    rollout = make_rollout(save_tiny_model(tmp_path))
    rollout.module.bfloat16()
    rollout.check()
    requests = make_requests(5)
    completions = rollout.generate(requests, sampling(stop_token_ids=()))
    assert isinstance(rollout.backend, fused_backend.FusedBackend)
    exact = tiny_model().float()
    exact.load_state_dict({name: value.float() for name, value in rollout.module.state_dict().items()})
    for request, completion in zip(requests, completions, strict=True):
        logits = exact(torch.cat([request.prompt_ids, completion.ids])[None]).logits[0, len(request.prompt_ids) - 1 : -1]
        expected = logits.log_softmax(-1).gather(-1, completion.ids[:, None])[:, 0]
        torch.testing.assert_close(completion.log_probs, expected, atol=0.02, rtol=0)


def test_the_next_generation_sees_new_weights_and_the_copies_are_gone_after_it(tmp_path: Path, compiled: Library) -> None:
    rollout = make_rollout(save_tiny_model(tmp_path))
    requests = make_requests(3)
    params = sampling(stop_token_ids=())
    before = rollout.generate(requests, params)
    assert rollout.backend._layers == []
    with torch.no_grad():
        rollout.module.model.layers[0].mlp.up_proj.weight.mul_(3.0)
    after = rollout.generate(requests, params)
    assert not torch.equal(before[0].log_probs, after[0].log_probs)


def test_a_model_with_other_parts_than_plain_linear_layers_goes_through_the_module(compiled: Library) -> None:
    class Adapter(nn.Linear):
        pass

    model = tiny_model()
    assert fused_backend.fused_library(model) is compiled
    assert fused_backend.fused_library(tiny_model("gemma", **FAMILIES["gemma"])) is None
    model.model.layers[1].self_attn.v_proj = Adapter(32, 16)
    assert fused_backend.fused_library(model) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("model_type", ["qwen2", "qwen3", "mistral"])
def test_all_layers_in_one_call_have_the_bits_of_one_after_another(
    tmp_path: Path, model_type: str, dtype: torch.dtype, compiled: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a bias, with norms of heads, with a window."""
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    path = save_tiny_model(tmp_path, model_type, **FAMILIES[model_type])

    def generate() -> list[object]:
        rollout = make_rollout(path)
        rollout.module.to(dtype)
        done = rollout.generate(make_requests(9), sampling(stop_token_ids=(), max_tokens=40))
        assert isinstance(rollout.backend, fused_backend.FusedBackend)
        return [ids_of(done), [c.log_probs.tolist() for c in done]]

    whole = generate()
    monkeypatch.setattr(fused_backend, "WholePass", OneByOne)
    assert generate() == whole
    assert OneByOne.calls


@pytest.mark.parametrize("threads", [2, 3])
def test_threads_that_wait_for_one_another_give_the_bits_of_one(tmp_path: Path, compiled: Library, threads: int) -> None:
    """More threads than key heads and than some machines have processors; prompts that end in a pass and prompts that do not."""
    path = save_tiny_model(tmp_path, "qwen2", **FAMILIES["qwen2"])

    def generate(threads: int) -> list[object]:
        torch.set_num_threads(threads)
        try:
            rollout = make_rollout(path, max_num_batched_tokens=16)
            done = rollout.generate(make_requests(9), sampling(stop_token_ids=(), max_tokens=20))
        finally:
            torch.set_num_threads(1)
        assert isinstance(rollout.backend, fused_backend.FusedBackend)
        return [ids_of(done), [c.log_probs.tolist() for c in done]]

    assert generate(threads) == generate(1)
