"""A model without weights and its files, against the same model loaded whole."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.families import FAMILIES
from helpers.tiny import save_tiny_model, tiny_model
from transformers import PreTrainedModel

from lockstep.config.engine import ModelConfig
from lockstep.errors import ConfigError, DataError
from lockstep.models.attention import CACHED, PackedLayout
from lockstep.models.fit import check_fit
from lockstep.models.load import Head, load_model, load_on_meta, share_structure
from lockstep.models.weight_files import WeightFiles


def load(path: str, head: Head = Head.LANGUAGE_MODEL, seed: int = 0, **options: object) -> PreTrainedModel:
    return load_model(ModelConfig(path=path, **options), head, seed)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("llama", {"attention_dropout": 0.5}),
        ("qwen3", {"attention_dropout": 0.5}),
        ("gpt2", {"attn_pdrop": 0.5, "resid_pdrop": 0.5, "embd_pdrop": 0.5}),
    ],
)
def test_dropout_is_off(tmp_path: Path, model_type: str, changes: dict[str, float]) -> None:
    ids = torch.arange(2, 10)[None]
    inputs = {"input_ids": ids, "position_ids": torch.arange(8)[None], "layout": PackedLayout(torch.tensor([8]))}
    path = save_tiny_model(tmp_path, model_type, **changes)
    for head in (Head.LANGUAGE_MODEL, Head.VALUE):  # transformers puts a dropout of 0.1 before a token classification head
        model = load(path, head)
        assert not any(module.training for module in model.modules())
        assert torch.equal(model(**inputs, use_cache=False).logits, model(**inputs, use_cache=False).logits)
    model = load(path)
    assert torch.allclose(model(**inputs, use_cache=False).logits, tiny_model(model_type, **changes)(ids).logits, atol=1e-5)


def test_a_new_value_head_depends_on_the_seed_alone(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path)
    heads = []
    for noise, seed in ((1, 5), (2, 5), (3, 6)):
        torch.manual_seed(noise)
        model = load(path, Head.VALUE, seed)
        heads.append(torch.cat([parameter.detach().flatten() for parameter in model.score.parameters()]))
        assert torch.equal(model.model.norm.weight, tiny_model().model.norm.weight)
    assert torch.equal(heads[0], heads[1])
    assert not torch.equal(heads[0], heads[2])


def test_loading_leaves_the_global_random_state_alone(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path)
    before = torch.get_rng_state()
    load(path, Head.VALUE)
    assert torch.equal(before, torch.get_rng_state())


def test_config_entries_can_be_replaced(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path)
    assert load(path, override_config={"rms_norm_eps": 0.25}).model.norm.variance_epsilon == 0.25


def test_a_second_structure_has_the_same_parameters_and_its_own_attention(tmp_path: Path) -> None:
    model = load(save_tiny_model(tmp_path, tie_word_embeddings=True))
    twin = share_structure(model, CACHED)
    assert [id(p) for p in twin.parameters()] == [id(p) for p in model.parameters()]
    assert twin.lm_head.weight is twin.model.embed_tokens.weight
    assert not twin.training
    assert model.config._attn_implementation != twin.config._attn_implementation == CACHED


def test_a_folder_that_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"not a Hugging Face model.*there is no config.json"):
        load(str(tmp_path))


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(DataError, match=r"weights of .* cannot be loaded as language_model: no file .*model.safetensors.*again"):
        load(path)


def test_a_broken_weights_file_is_refused(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not a safetensors file")
    with pytest.raises(DataError, match="is not a safetensors file: it has 22 bytes"):
        load(path)


def test_a_family_without_token_classification_has_no_value_head(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path, "cohere")
    with pytest.raises(DataError, match=r"cannot be loaded as value: .*CohereConfig.*no such head.*critic\.model\.path"):
        load(path, Head.VALUE)


@pytest.mark.parametrize("head", [Head.VALUE, Head.SCORE])
def test_a_model_that_scores_is_no_language_model_though_its_weights_are_tied(tmp_path: Path, head: Head) -> None:
    load(save_tiny_model(tmp_path / "a", tie_word_embeddings=True), Head.VALUE).save_pretrained(tmp_path / "b")
    config = json.loads((tmp_path / "b/config.json").read_text())
    config["architectures"] = ["LlamaForTokenClassification" if head is Head.VALUE else "LlamaForSequenceClassification"]
    (tmp_path / "b/config.json").write_text(json.dumps(config))
    scores = ModelConfig(path=str(tmp_path / "b"))
    for refuse in (lambda: load(str(scores.path)), lambda: check_fit(scores, Head.LANGUAGE_MODEL, "model")):
        with pytest.raises(DataError, match=r"which scores texts and writes none; name a language model"):
            refuse()
    check_fit(scores, Head.VALUE, "critic.model")


def test_a_language_model_is_not_a_reward_model(tmp_path: Path) -> None:
    """transformers would draw the score head and go on: rewards from a random head."""
    with pytest.raises(DataError, match=r"incomplete for score: 1 missing, first \['score.weight'\]"):
        load(save_tiny_model(tmp_path), Head.SCORE)


def test_missing_weights_are_not_drawn_at_random(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path)
    for head in (Head.LANGUAGE_MODEL, Head.VALUE):
        with pytest.raises(DataError, match="incomplete"):
            load(path, head, override_config={"num_hidden_layers": 3})


def test_weights_of_another_shape_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"cannot be loaded as language_model: .* other sizes than config\.json says"):
        load(save_tiny_model(tmp_path), override_config={"vocab_size": 40})


@pytest.mark.parametrize("model_type", ["gpt2", "gemma", "phi", "gpt_neox", "opt", "qwen3_moe"])
def test_families_with_causal_softmax_attention_can_be_packed(model_type: str, tmp_path: Path) -> None:
    changes: dict[str, Any] = {
        "gpt2": {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 64},
        "gemma": {"head_dim": 8},
        "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
        "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8},
    }.get(model_type, {})
    load_model(ModelConfig(path=save_tiny_model(tmp_path, model_type, **changes)), Head.LANGUAGE_MODEL, seed=0)


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [("bloom", {"n_head": 4, "n_layer": 2}), ("mamba", {}), ("falcon", {"alibi": True})],
    ids=["position in the scores", "no attention", "outside the attention interface"],
)
def test_families_that_packing_would_compute_wrongly_are_refused_at_load(model_type: str, changes: Any, tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path, model_type, **changes)
    with pytest.raises((ConfigError, DataError), match=str(tmp_path)):
        load_model(ModelConfig(path=path, enable_gradient_checkpointing=False), Head.LANGUAGE_MODEL, seed=0)


def test_a_family_with_a_table_of_attention_is_refused_with_that_reason(tmp_path: Path) -> None:
    """transformers raises KeyError: 'lockstep_packed'."""
    with pytest.raises(DataError, match="its attention is one of a fixed table"):
        load(save_tiny_model(tmp_path, "falcon"))


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
