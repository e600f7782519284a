from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.cpu_kernels import rotate
from helpers.families import FAMILIES
from helpers.rollouts import ids_of, make_requests, make_rollout, sampling
from helpers.tiny import save_tiny_model
from torch import Tensor

from lockstep.workers.rollout.native.cpu import fused
from lockstep.workers.rollout.native.cpu.kernels import Library, Pages, attend, rms_norm, store
from lockstep.workers.rollout.native.cpu.paged import StepBatch


class OneAfterAnother:
    """WholePass in Python: the functions called one by one."""

    calls = 0

    def __init__(self, library: Library, layers: list[Any], pages: list[Pages], sizes: tuple[int, int, int], eps: float) -> None:
        self.library, self.layers, self.pages, self.sizes, self.eps = library, layers, pages, sizes, eps

    def __call__(self, hidden: Tensor, angles: tuple[Tensor, Tensor], batch: StepBatch, blocks: Tensor, wanted: Tensor) -> Tensor:
        (heads, kv_heads, dim), lib = self.sizes, self.library
        OneAfterAnother.calls += 1
        for layer, pages in zip(self.layers, self.pages, strict=True):
            qkv = layer.qkv(rms_norm(lib, hidden, layer.input_norm, self.eps)).view(len(hidden), -1, dim)
            rotate(lib, qkv[:, : heads + kv_heads], heads, angles, batch.positions, layer.norms, self.eps)
            query, key, value = qkv.split([heads, kv_heads, kv_heads], dim=1)
            store(lib, key, value, batch.slots, pages)
            seen = attend(lib, query, pages, batch.page_table, blocks, layer.variant)
            layer.out.add_to(hidden, seen.flatten(1))
            layer.down.add_to(hidden, layer.gate_up(rms_norm(lib, hidden, layer.mlp_norm, self.eps)))
        return hidden[wanted]


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
    monkeypatch.setattr(fused, "WholePass", OneAfterAnother)
    assert generate() == whole
    assert OneAfterAnother.calls


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
