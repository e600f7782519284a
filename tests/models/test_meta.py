"""A model without weights and its files, against the same model loaded whole."""

from pathlib import Path

import pytest
import torch
from helpers.families import FAMILIES
from helpers.tiny import save_tiny_model, tiny_model

from lockstep.config.engine import ModelConfig
from lockstep.errors import DataError
from lockstep.models.load import Head, load_model, load_on_meta
from lockstep.models.meta import WeightFiles

CASES = {
    "llama": ("llama", Head.LANGUAGE_MODEL, {}),
    "qwen2 tied": ("qwen2", Head.LANGUAGE_MODEL, {"tie_word_embeddings": True}),
    "new value head": ("llama", Head.VALUE, {}),
    "value head": ("llama", Head.VALUE, {"value_head": True}),
    "qwen3": ("qwen3", Head.LANGUAGE_MODEL, {}),
}


@pytest.mark.parametrize("case", CASES)
def test_names_weights_and_buffers_are_those_of_the_whole_model(tmp_path: Path, case: str) -> None:
    family, head, changes = CASES[case]
    config = ModelConfig(path=save_tiny_model(tmp_path, family, **changes))
    whole = load_model(config, head, seed=5)
    found = load_on_meta(config, head, seed=5)
    assert found is not None
    empty, source = found
    assert all(parameter.is_meta for parameter in empty.parameters())
    want = dict(whole.named_parameters())
    assert [name for name, _ in empty.named_parameters()] == list(want)
    for name, tensor in want.items():
        middle = len(tensor) // 2
        parts = [source.read(name, 0, middle), source.read(name, middle, len(tensor))]
        torch.testing.assert_close(torch.cat(parts), tensor.detach(), atol=0, rtol=0)
    for (name, mine), (_, theirs) in zip(empty.named_buffers(), whole.named_buffers(), strict=True):
        assert torch.equal(mine, theirs), name
    assert empty.config._attn_implementation == whole.config._attn_implementation
    assert empty.training == whole.training


def test_weights_in_several_files_are_found(tmp_path: Path) -> None:
    model = tiny_model("llama")
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert not (tmp_path / "model.safetensors").exists()
    files = WeightFiles(tmp_path)
    want = model.state_dict()
    assert files.shapes == {name: tuple(tensor.shape) for name, tensor in want.items()}
    for name, tensor in want.items():
        assert torch.equal(files.read(name, 1, 3), tensor[1:3])


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "gpt_neox"])
def test_files_that_need_a_conversion_are_left_to_the_whole_load(tmp_path: Path, family: str) -> None:
    path = save_tiny_model(tmp_path, family, **FAMILIES[family])
    assert load_on_meta(ModelConfig(path=path), Head.LANGUAGE_MODEL, seed=0) is None


def test_what_the_whole_load_refuses_is_left_to_it(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path)
    other = ModelConfig(path=path, override_config={"vocab_size": 40})
    assert load_on_meta(other, Head.LANGUAGE_MODEL, seed=0) is None
    assert load_on_meta(ModelConfig(path=path), Head.SCORE, seed=0) is None


def test_a_broken_file_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(DataError, match=r"model\.safetensors cannot be read"):
        WeightFiles(tmp_path)


@pytest.mark.parametrize(("value", "words"), [(float("nan"), "1 NaN and 0 inf"), (float("-inf"), "0 NaN and 1 inf")])
@pytest.mark.parametrize("safe", [True, False], ids=["read in parts", "loaded whole"])
def test_a_weight_that_is_not_finite_is_named(tmp_path: Path, value: float, words: str, safe: bool) -> None:
    model = tiny_model()
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[7, 3] = value
    model.save_pretrained(tmp_path)
    with pytest.raises(DataError, match=rf"the weight model\.layers\.1\.mlp\.up_proj\.weight has {words} among 1536"):
        if safe:
            WeightFiles(tmp_path).read("model.layers.1.mlp.up_proj.weight", 0, 48)
        else:
            load_model(ModelConfig(path=str(tmp_path)), Head.LANGUAGE_MODEL, seed=0)


def test_large_weights_whose_sum_overflows_are_finite(tmp_path: Path) -> None:
    model = tiny_model()
    with torch.no_grad():
        model.lm_head.weight.fill_(3e38)
    model.save_pretrained(tmp_path)
    assert WeightFiles(tmp_path).read("lm_head.weight", 0, 32).max() == 3e38
