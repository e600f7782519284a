import shutil

import pytest
import torch
from helpers.distributed import run_distributed
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from lockstep.errors import DataError
from lockstep.utils.fsdp_shards import verl_checkpoint
from lockstep.utils.model_source import model_folder


@pytest.fixture
def weights(embedded_task):
    return load_file(embedded_task.model / "model.safetensors")


def save(folder, weights, shape, placements):
    """As verl saves: a file for each rank, with DTensors."""

    def rank():
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("ddp", "fsdp")[-len(shape) :])
        state = {name: distribute_tensor(tensor, mesh, placements) for name, tensor in weights.items()}
        number, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
        torch.save(state, folder / f"model_world_size_{world}_rank_{number}.pt")

    folder.mkdir(parents=True)
    run_distributed(rank, torch.tensor(shape).prod().item())


@pytest.fixture
def checkpoint(tmp_path, weights, embedded_task, monkeypatch):
    """`checkpoint(shape, placements)`: a folder global_step_7."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def make(shape, placements):
        actor = tmp_path / "global_step_7" / "actor"
        save(actor, weights, shape, placements)
        shutil.copytree(embedded_task.model, actor / "huggingface", ignore=shutil.ignore_patterns("*.safetensors"))
        return tmp_path / "global_step_7"

    return make


@pytest.mark.parametrize(("shape", "placements"), [((2,), [Shard(0)]), ((2, 2), [Replicate(), Shard(0)])])
def test_the_shards_of_all_ranks_are_a_model_again(checkpoint, weights, shape, placements):
    step = checkpoint(shape, placements)
    folder = model_folder(str(step / "actor"))
    assert model_folder(str(step)) == folder
    merged = load_file(f"{folder}/model.safetensors")
    assert merged.keys() == weights.keys()
    assert all(torch.equal(merged[name], weights[name]) for name in weights)
    from transformers import AutoModelForCausalLM

    assert AutoModelForCausalLM.from_pretrained(folder).config.vocab_size > 0


def test_a_run_starts_from_it(checkpoint, embedded_config):
    from lockstep.utils.tokenizer import hf_tokenizer

    step = checkpoint((2,), [Shard(0)])
    config = embedded_config(f"actor_rollout_ref.model.path={step}")
    assert len(hf_tokenizer(str(config.actor_rollout_ref.model.path))) > 0


def test_weights_that_were_saved_whole_are_taken(tmp_path, embedded_task):
    shutil.copytree(embedded_task.model, tmp_path / "actor" / "huggingface")
    assert model_folder(str(tmp_path)) == str(tmp_path / "actor" / "huggingface")
    assert verl_checkpoint(embedded_task.model) is None


def test_what_cannot_be_merged_says_what_to_do(checkpoint, tmp_path):
    step = checkpoint((2,), [Shard(0)])
    (step / "actor" / "model_world_size_2_rank_1.pt").unlink()
    with pytest.raises(DataError, match="lacks model_world_size_2_rank_1.pt"):
        model_folder(str(step))
    (tmp_path / "megatron" / "dist_ckpt").mkdir(parents=True)
    with pytest.raises(DataError, match="lacks .metadata"):
        model_folder(str(tmp_path / "megatron"))
