"""What every backend makes of an spec before it differs from the others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.distributed import run_distributed
from helpers.engines import OPTIM
from helpers.families import FAMILIES
from helpers.tiny import save_tiny_model

from lockstep.config.engine import ModelConfig, OptimConfig
from lockstep.models.load import Head
from lockstep.models.recompute import choose_recompute
from lockstep.workers.engine import spec as spec_module
from lockstep.workers.engine.spec import EngineSpec


def make_spec(path: str, optim: OptimConfig | None = OPTIM, max_tokens: int | None = None, **model: Any) -> EngineSpec:
    return EngineSpec(
        model=ModelConfig(path=path, **model),
        head=Head.LANGUAGE_MODEL,
        optim=optim,
        total_updates=1,
        device=torch.device("cpu"),
        seed=5,
        max_tokens=max_tokens,
    )


@pytest.mark.parametrize("family", ["llama", "mixtral", "gpt_neox"])
def test_a_model_comes_without_weights_and_with_what_fills_it_however_its_files_are(tmp_path: Path, family: str) -> None:
    """Of mixtral and gpt_neox the names in the files are not those of the model."""
    changes = {"tie_word_embeddings": True} if family == "llama" else FAMILIES[family]
    spec = make_spec(save_tiny_model(tmp_path, family, **changes))
    whole = spec.load_whole()
    module, source = spec.load()
    wanted = dict(whole.named_parameters())
    assert [name for name, _ in module.named_parameters()] == list(wanted)
    assert all(parameter.is_meta for parameter in module.parameters())
    for name, tensor in wanted.items():
        assert torch.equal(source.read(name, 1, len(tensor)), tensor[1:])
    for (name, mine), (_, theirs) in zip(module.named_buffers(), whole.named_buffers(), strict=True):
        assert torch.equal(mine, theirs), name
    tied = whole.get_output_embeddings().weight is whole.get_input_embeddings().weight
    assert (module.get_output_embeddings().weight is module.get_input_embeddings().weight) == tied


def test_only_what_learns_recomputes_and_auto_takes_the_least_that_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save_tiny_model(tmp_path)
    frozen, told = make_spec(path, optim=None, recompute="full"), make_spec(path, recompute="selective")
    off, free = make_spec(path, enable_gradient_checkpointing=False), 1_000_000
    module = frozen.load_whole()
    assert [spec.recompute(module, torch.float32) for spec in (frozen, off, told)] == ["none", "none", "selective"]
    monkeypatch.setattr(spec_module, "free_memory", lambda device: free)

    def choose(tokens: int | None, fast: bool) -> str:
        return make_spec(path, max_tokens=tokens).recompute(module, torch.bfloat16, fast)

    cases = [(tokens, fast) for tokens in (None, 1, 60, 120, 100_000) for fast in (False, True)]
    found = run_distributed(lambda: [choose(*case) for case in cases], 1)[0]
    assert found == [choose_recompute(module, tokens, free, 1, 2, fast) for tokens, fast in cases]
    assert {"none", "full"} <= set(found)
