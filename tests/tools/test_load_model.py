"""What a path means, and that what is loaded is the model: adapters merged, the newest checkpoint of a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from helpers.rollouts import make_requests, sampling
from helpers.tiny import save_tiny_model, tiny_model
from safetensors.torch import save_file

from lockstep.checkpoint.folders import make_draft, publish, write_state
from lockstep.config.actor_rollout_ref import RolloutConfig
from lockstep.errors import ConfigError, DataError
from lockstep.tools.load_model import ModelSource, as_options, find_model, load


def write_checkpoint(run: Path, step: int, seed: int) -> Path:
    """A checkpoint as a run writes it, of the tiny model of `seed`."""
    draft = make_draft(run, step)
    save_tiny_model(draft / "actor", seed=seed)
    write_state(draft, {"global_steps": step})
    return publish(draft, {})


def test_a_run_is_its_newest_checkpoint_and_a_checkpoint_its_policy(tmp_path):
    first, second = write_checkpoint(tmp_path / "run", 9, seed=1), write_checkpoint(tmp_path / "run", 10, seed=2)
    assert find_model(str(tmp_path / "run")) == ModelSource(str(second / "actor"), None, 10)
    assert find_model(str(first)) == ModelSource(str(first / "actor"), None, 9)
    assert find_model("org/model") == ModelSource("org/model")
    loaded = load(find_model(str(tmp_path / "run")), RolloutConfig(), device="cpu")
    expected = dict(tiny_model(seed=2).named_parameters())
    for name, parameter in loaded.engine.module.named_parameters():
        assert torch.equal(parameter, expected[name]), name
    assert loaded.stop_token_ids == (1,)


@pytest.mark.parametrize("file", ["latest_checkpointed_iteration.txt", "run.lock"])
def test_a_run_without_a_checkpoint_is_said(tmp_path, file):
    (tmp_path / file).write_text("3")
    with pytest.raises(DataError, match="without a checkpoint"):
        find_model(str(tmp_path))


def test_what_is_no_model_is_said(tmp_path):
    empty = make_draft(tmp_path / "run", 1)
    write_state(empty, {"global_steps": 1})
    with pytest.raises(DataError, match="without a model in actor"):
        find_model(str(publish(empty, {})))
    with pytest.raises(DataError, match="does not exist"):
        load(ModelSource(str(tmp_path / "nothing")), RolloutConfig(), device="cpu")


def write_adapter(folder: Path, base: str | None) -> dict[str, torch.Tensor]:
    """An adapter of rank 2 beside every q_proj; returns its tensors."""
    folder.mkdir()
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 6, "target_modules": ["q_proj"], "base_model_name_or_path": base}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(0)
    place = "base_model.model.model.layers.{}.self_attn.q_proj.lora_{}.weight"
    shapes = {place.format(layer, part): shape for layer in (0, 1) for part, shape in (("A", (2, 32)), ("B", (32, 2)))}
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    save_file(tensors, folder / "adapter_model.safetensors")
    return tensors


def test_an_adapter_is_merged_into_its_model(tmp_path):
    base = save_tiny_model(tmp_path / "base")
    tensors = write_adapter(tmp_path / "adapter", base)
    source = find_model(str(tmp_path / "adapter"))
    assert source == find_model(base, str(tmp_path / "adapter")) == ModelSource(base, str(tmp_path / "adapter"))
    engine = load(source, RolloutConfig(), device="cpu").engine
    expected = dict(tiny_model().double().named_parameters())
    for name, parameter in engine.module.named_parameters():
        wanted = expected[name]
        if "q_proj" in name:
            a, b = (tensors[f"base_model.model.{name.replace('weight', f'lora_{part}.weight')}"].double() for part in "AB")
            wanted = wanted + 3.0 * b @ a
        torch.testing.assert_close(parameter.double(), wanted, atol=1e-6, rtol=1e-6)
    assert all(completion.error is None for completion in engine.generate(make_requests(2), sampling()))


def test_adapters_that_do_not_fit_are_said(tmp_path):
    write_adapter(tmp_path / "adapter", None)
    with pytest.raises(ConfigError, match="does not say which model"):
        find_model(str(tmp_path / "adapter"))
    with pytest.raises(ConfigError, match="is an adapter itself"):
        find_model(str(tmp_path / "adapter"), str(tmp_path / "adapter"))
    other = save_tiny_model(tmp_path / "other", hidden_size=16)
    with pytest.raises(DataError, match="does not fit the model"):
        load(find_model(other, str(tmp_path / "adapter")), RolloutConfig(), device="cpu")


def test_errors_name_the_commands_options():
    assert (
        as_options("trainer.device=cuda, but; use trainer.device=cpu (or auto)") == "--device cuda, but; use --device cpu (or auto)"
    )
    assert (
        as_options("actor_rollout_ref.rollout.name=vllm needs; use rollout.name=native")
        == "--engine vllm needs; use --engine native"
    )
    assert as_options("raise actor_rollout_ref.rollout.gpu_memory_utilization, or") == "raise --gpu-memory-utilization, or"
    assert as_options("Set actor_rollout_ref.rollout.fallback_to_hf=true to") == "Set --engine hf to"
    others = "actor_rollout_ref.rollout.val_kwargs.temperature=2 my.trainer.device=1 rollout.name_of=1 sampling.temperatures"
    assert as_options(others) == others
