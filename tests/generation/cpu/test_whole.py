from pathlib import Path

import pytest
import torch
from helpers.families import FAMILIES
from helpers.rollouts import ids_of, make_requests, make_rollout, sampling
from helpers.tiny import save_tiny_model

from benchmarks.one_by_one import OneByOne
from lockstep.generation.cpu import fused
from lockstep.generation.cpu.kernels import Library


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
        assert isinstance(rollout.backend, fused.FusedBackend)
        return [ids_of(done), [c.log_probs.tolist() for c in done]]

    whole = generate()
    monkeypatch.setattr(fused, "WholePass", OneByOne)
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
        assert isinstance(rollout.backend, fused.FusedBackend)
        return [ids_of(done), [c.log_probs.tolist() for c in done]]

    assert generate(threads) == generate(1)
