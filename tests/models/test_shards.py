"""A checkpoint as Megatron's dist_checkpointing writes it; in tests/backends/megatron Megatron itself writes one."""

import json
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from helpers.distributed import run_distributed
from helpers.tiny import save_tiny_model
from safetensors.torch import load_file
from torch.distributed import checkpoint
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from lockstep.errors import DataError
from lockstep.models.shards import verl_checkpoint
from lockstep.models.source import model_folder


@pytest.fixture
def weights(embedded_task):
    return load_file(embedded_task.model / "model.safetensors")


def save_shards(folder, weights, shape, placements):
    """As verl saves: a file for each rank, with DTensors."""

    def rank():
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("ddp", "fsdp")[-len(shape) :])
        state = {name: distribute_tensor(tensor, mesh, placements) for name, tensor in weights.items()}
        number, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
        torch.save(state, folder / f"model_world_size_{world}_rank_{number}.pt")

    folder.mkdir(parents=True)
    run_distributed(rank, torch.tensor(shape).prod().item())


@pytest.fixture
def fsdp_checkpoint(tmp_path, weights, embedded_task, monkeypatch):
    """`fsdp_checkpoint(shape, placements)`: a folder global_step_7."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def make(shape, placements):
        actor = tmp_path / "global_step_7" / "actor"
        save_shards(actor, weights, shape, placements)
        shutil.copytree(embedded_task.model, actor / "huggingface", ignore=shutil.ignore_patterns("*.safetensors"))
        return tmp_path / "global_step_7"

    return make


@pytest.mark.parametrize(("shape", "placements"), [((2,), [Shard(0)]), ((2, 2), [Replicate(), Shard(0)])])
def test_the_shards_of_all_ranks_are_a_model_again(fsdp_checkpoint, weights, shape, placements):
    step = fsdp_checkpoint(shape, placements)
    folder = model_folder(str(step / "actor"))
    assert model_folder(str(step)) == folder
    merged = load_file(f"{folder}/model.safetensors")
    assert merged.keys() == weights.keys()
    assert all(torch.equal(merged[name], weights[name]) for name in weights)
    from transformers import AutoModelForCausalLM

    assert AutoModelForCausalLM.from_pretrained(folder).config.vocab_size > 0


def test_a_run_starts_from_it(fsdp_checkpoint, embedded_config):
    from lockstep.utils.tokenizer import hf_tokenizer

    step = fsdp_checkpoint((2,), [Shard(0)])
    config = embedded_config(f"actor_rollout_ref.model.path={step}")
    assert len(hf_tokenizer(str(config.actor_rollout_ref.model.path))) > 0


def test_weights_that_were_saved_whole_are_taken(tmp_path, embedded_task):
    shutil.copytree(embedded_task.model, tmp_path / "actor" / "huggingface")
    assert model_folder(str(tmp_path)) == str(tmp_path / "actor" / "huggingface")
    assert verl_checkpoint(embedded_task.model) is None


def test_what_cannot_be_merged_says_what_to_do(fsdp_checkpoint, tmp_path):
    step = fsdp_checkpoint((2,), [Shard(0)])
    (step / "actor" / "model_world_size_2_rank_1.pt").unlink()
    with pytest.raises(DataError, match="lacks model_world_size_2_rank_1.pt"):
        model_folder(str(step))
    (tmp_path / "megatron" / "dist_ckpt").mkdir(parents=True)
    with pytest.raises(DataError, match="lacks .metadata"):
        model_folder(str(tmp_path / "megatron"))


KV, HEADS, LAYERS = 2, 4, 2


@pytest.fixture
def model(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    sizes = {"num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": KV}
    save_tiny_model(tmp_path / "model", **sizes)
    return tmp_path / "model"


def megatron_tensors(weights, is_stacked):
    """Hugging Face's weights under Megatron's names, with a padded vocabulary."""
    pad = torch.nn.functional.pad
    found = {"embedding.word_embeddings.weight": pad(weights["model.embed_tokens.weight"], (0, 0, 0, 3), value=9.0),
             "decoder.final_layernorm.weight": weights["model.norm.weight"]}  # fmt: skip
    if "lm_head.weight" in weights:
        found["output_layer.weight"] = pad(weights["lm_head.weight"], (0, 0, 0, 3), value=9.0)
    layers = []
    for layer in range(LAYERS):
        of = {
            name.removeprefix(f"model.layers.{layer}."): x
            for name, x in weights.items()
            if name.startswith(f"model.layers.{layer}.")
        }
        parts = {}
        for kind in ("weight", "bias"):
            if f"self_attn.q_proj.{kind}" in of:
                groups = [of[f"self_attn.{x}_proj.{kind}"].unflatten(0, (KV, -1)) for x in "qkv"]
                parts[f"self_attention.linear_qkv.{kind}"] = torch.cat(groups, dim=1).flatten(0, 1)
        gate, up = of["mlp.gate_proj.weight"], of["mlp.up_proj.weight"]
        parts |= {"mlp.linear_fc1.weight": torch.cat([gate, up])} if is_stacked else {
            "mlp.linear_fc1.weight_w": gate, "mlp.linear_fc1.weight_v": up}  # fmt: skip
        parts |= {"self_attention.linear_qkv.layer_norm_weight": of["input_layernorm.weight"],
                  "mlp.linear_fc1.layer_norm_weight": of["post_attention_layernorm.weight"],
                  "self_attention.linear_proj.weight": of["self_attn.o_proj.weight"],
                  "mlp.linear_fc2.weight": of["mlp.down_proj.weight"]}  # fmt: skip
        parts |= {
            f"self_attention.{x}_layernorm.weight": of[f"self_attn.{x}_norm.weight"]
            for x in "qk"
            if f"self_attn.{x}_norm.weight" in of
        }
        layers.append(parts)
    if is_stacked:
        return found | {f"decoder.layers.{name}": torch.stack([parts[name] for parts in layers]) for name in layers[0]}
    return found | {f"decoder.layers.{i}.{name}": x for i, parts in enumerate(layers) for name, x in parts.items()}


def save(tensors, folder: Path, model: Path):
    checkpoint.save(dict(tensors), checkpoint_id=folder / "dist_ckpt", no_dist=True)
    shutil.copytree(model, folder / "huggingface", ignore=shutil.ignore_patterns("*.safetensors"))


@pytest.mark.parametrize(("inside", "is_stacked"), [("actor", True), ("actor/model", True), ("actor/model", False)])
def test_it_is_the_model_again(model, tmp_path, inside, is_stacked):
    weights = load_file(model / "model.safetensors")
    save(megatron_tensors(weights, is_stacked), tmp_path / "global_step_3" / inside, model)
    folder = model_folder(str(tmp_path / "global_step_3"))
    assert model_folder(str(tmp_path / "global_step_3" / "actor")) == folder
    found = load_file(f"{folder}/model.safetensors")
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], weights[name]) for name in weights)
    assert json.loads(Path(folder, "config.json").read_text())["num_hidden_layers"] == LAYERS


def test_the_checkpoint_of_another_step_is_another_model(model, tmp_path):
    weights = load_file(model / "model.safetensors")
    for step in (1, 2):
        save(
            megatron_tensors({name: x * step for name, x in weights.items()}, True),
            tmp_path / f"global_step_{step}" / "actor",
            model,
        )
    assert model_folder(str(tmp_path / "global_step_1")) != model_folder(str(tmp_path / "global_step_2"))


def test_what_is_not_known_says_what_merges_it(model, tmp_path):
    weights = megatron_tensors(load_file(model / "model.safetensors"), True)
    save(weights | {"decoder.layers.mlp.router.weight": torch.ones(2, 2)}, tmp_path / "step" / "actor", model)
    with pytest.raises(DataError, match=r"router.*verl.model_merger merge --backend megatron --local_dir"):
        model_folder(str(tmp_path / "step"))


def test_a_file_that_would_make_other_objects_is_not_read(model, tmp_path):
    actor = tmp_path / "step" / "actor"
    save(megatron_tensors(load_file(model / "model.safetensors"), True), actor, model)
    (actor / "dist_ckpt" / ".metadata").write_bytes(pickle.dumps(print))
    with pytest.raises(DataError, match="names builtins.print"):
        model_folder(str(tmp_path / "step"))
    (actor / "dist_ckpt" / ".metadata").unlink()
    with pytest.raises(DataError, match="lacks .metadata"):
        model_folder(str(tmp_path / "step"))
