"""What is exported loads in plain transformers and peft, with the logits of what was trained."""

import json

import pytest
import torch
from helpers.tiny import save_tiny_model, tiny_model
from tools.test_load_model import write_adapter, write_checkpoint
from transformers import AutoModelForCausalLM, AutoTokenizer

from lockstep import cli
from lockstep.errors import ConfigError, DataError, ResourceError
from lockstep.tools import export as command
from lockstep.tools.export import export, main

IDS = torch.tensor([[3, 7, 5, 9, 4]])


def logits(model):
    with torch.no_grad():
        return model(IDS).logits.float()


def loaded(folder, dtype="auto"):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_runs_newest_checkpoint_in_a_type_has_the_logits_of_its_weights_in_that_type(tmp_path, dtype, capsys):
    write_checkpoint(tmp_path / "run", 1, seed=1)
    newest = write_checkpoint(tmp_path / "run", 2, seed=2)
    (newest / "actor" / "optimizer").mkdir()
    (newest / "actor" / "optimizer_progress.json").write_text("{}")
    assert main([str(tmp_path / "run"), str(tmp_path / "out"), "--dtype", dtype]) == 0
    assert capsys.readouterr().out == f"the model in {dtype}: {tmp_path / 'out'}\n"
    model = loaded(tmp_path / "out")
    assert model.dtype == getattr(torch, dtype)
    assert torch.equal(logits(model), logits(loaded(newest / "actor", getattr(torch, dtype))))
    if dtype == "float32":
        assert torch.equal(logits(model), logits(tiny_model(seed=2)))
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("abc")["input_ids"]
    assert not (tmp_path / "out" / "optimizer_progress.json").exists()
    assert not (tmp_path / "out" / "optimizer").exists()


def test_many_weights_are_many_files_with_an_index(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "_FILE_BYTES", 20_000)
    export(save_tiny_model(tmp_path / "model"), tmp_path / "out", "float32", merge=False)
    assert len(list((tmp_path / "out").glob("model-0*.safetensors"))) > 1
    assert torch.equal(logits(loaded(tmp_path / "out")), logits(tiny_model()))


def test_an_adapter_stays_one_or_is_merged_as_peft_merges_it(tmp_path):
    peft = pytest.importorskip("peft")
    base = save_tiny_model(tmp_path / "base")
    write_adapter(tmp_path / "adapter", base)
    expected = logits(peft.PeftModel.from_pretrained(loaded(base), tmp_path / "adapter").eval())
    assert export(str(tmp_path / "adapter"), tmp_path / "merged", "float32", merge=True) == "the model with its adapter merged"
    assert torch.allclose(logits(loaded(tmp_path / "merged")), expected, atol=1e-5)
    assert not torch.allclose(logits(loaded(base)), expected, atol=1e-2)
    assert export(str(tmp_path / "adapter"), tmp_path / "kept", "float32", merge=False) == "the adapter"
    assert torch.equal(logits(peft.PeftModel.from_pretrained(loaded(base), tmp_path / "kept").eval()), expected)
    assert not (tmp_path / "kept" / "config.json").exists()


def test_a_checkpoint_with_an_adapter_gives_either(tmp_path):
    folder = write_checkpoint(tmp_path / "run", 1, seed=1) / "actor"
    write_adapter(folder / "adapter", "the/base")
    assert export(str(tmp_path / "run"), tmp_path / "merged", "float32", merge=True) == "the model with its adapter merged"
    assert torch.equal(logits(loaded(tmp_path / "merged")), logits(tiny_model(seed=1))), "a checkpoint is merged already"
    assert export(str(tmp_path / "run"), tmp_path / "kept", "bfloat16", merge=False) == "the adapter"
    assert json.loads((tmp_path / "kept" / "adapter_config.json").read_text())["base_model_name_or_path"] == "the/base"
    assert (tmp_path / "kept" / "tokenizer.json").exists()


def test_what_cannot_be_exported_is_said_and_leaves_nothing(tmp_path):
    base = save_tiny_model(tmp_path / "base")
    with pytest.raises(ConfigError, match="has no adapter; leave --merge out"):
        export(base, tmp_path / "out", "float32", merge=True)
    with pytest.raises(DataError, match="no config.json"):
        export("org/model", tmp_path / "out", "float32", merge=False)
    with pytest.raises(ConfigError, match="is there already"):
        export(base, tmp_path / "base", "float32", merge=False)
    with pytest.raises(ResourceError, match="config.json/out cannot be made: "):  # below a file
        export(base, tmp_path / "base/config.json/out", "float32", merge=False)
    model = tiny_model()
    model.model.embed_tokens.weight.data[0, 0] = 1e6
    model.save_pretrained(tmp_path / "large")
    with pytest.raises(DataError, match="embed_tokens.weight has numbers up to 1e.06, which torch.float16 cannot hold"):
        export(str(tmp_path / "large"), tmp_path / "out", "float16", merge=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "large"]
    assert cli.COMMANDS["export"][0] == main.__module__
