import json
import shutil

import pytest
from helpers.mixtures import MIXTURES
from helpers.tiny import save_tiny_model, tiny_config

from lockstep.errors import ConfigError, DataError
from lockstep.models.hf_config import context_limit, packed_limit, read_model_config, stop_token_ids


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def test_entries_of_the_config_can_be_replaced(model):
    assert read_model_config(model).max_position_embeddings == 64
    assert read_model_config(model, max_position_embeddings=128, num_labels=1).max_position_embeddings == 128
    assert read_model_config(model, num_labels=1).num_labels == 1


def test_an_entry_that_the_config_does_not_have_is_an_error(model):
    with pytest.raises(ConfigError, match=r"model\.override_config names max_positions, .*LlamaConfig"):
        read_model_config(model, max_positions=128)


@pytest.mark.parametrize("family", MIXTURES)
def test_a_token_goes_to_no_more_experts_than_there_are(tmp_path, family):
    path = save_tiny_model(tmp_path, family, **MIXTURES[family])
    assert read_model_config(path, num_experts_per_tok=4).num_experts_per_tok == 4
    for wrong in (0, 5):
        with pytest.raises(
            ConfigError, match=rf"num_experts_per_tok={wrong} must be between 1 and its 4 experts \(model\.override"
        ):
            read_model_config(path, num_experts_per_tok=wrong)


def test_a_value_of_another_type_is_an_error_that_names_it(model, tmp_path):
    with pytest.raises(
        ConfigError, match=r"^model\.override_config, or config\.json of .*'hidden_size' expected int, got str.*'abc'"
    ):
        read_model_config(model, hidden_size="abc")
    shutil.copytree(model, tmp_path / "model")
    config = json.loads((tmp_path / "model/config.json").read_text())
    (tmp_path / "model/config.json").write_text(json.dumps(config | {"hidden_size": "32"}))
    with pytest.raises(ConfigError, match=r"^config\.json of .*'hidden_size' expected int, got str"):
        read_model_config(str(tmp_path / "model"))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: path.mkdir(), r"no config\.json"),
        (lambda path: path.write_text("weights"), r"no config\.json"),
        (lambda path: (path.mkdir(), (path / "config.json").write_text("{")), r"config\.json cannot be used: .*JSON"),
        (
            lambda path: (path.mkdir(), (path / "config.json").write_text('{"model_type": "none"}')),
            r"config\.json cannot be used: .*`none`",
        ),
    ],
)
def test_what_is_not_a_model_is_an_error_that_names_it(tmp_path, make, message):
    path = tmp_path / "thing"
    make(path)
    with pytest.raises(DataError, match=f"{path}.*{message}"):
        read_model_config(str(path))


def test_a_path_that_does_not_exist_is_an_error_that_says_what_to_pass(tmp_path):
    with pytest.raises(DataError, match="missing does not exist; expected a Hugging Face model folder, or a hub id"):
        read_model_config(str(tmp_path / "missing"))


class Tokenizer:
    eos_token_id = 1


@pytest.mark.parametrize(("listed", "expected"), [(None, (1,)), (5, (1, 5)), ([7, 1, 3], (1, 3, 7)), ("no file", (1,))])
def test_a_response_ends_at_the_tokenizers_end_and_at_those_the_model_lists(tmp_path, listed, expected):
    if listed != "no file":
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": listed}))
    assert stop_token_ids(str(tmp_path), Tokenizer()) == expected


def test_without_any_end_token_there_is_none(tmp_path):
    tokenizer = Tokenizer()
    tokenizer.eos_token_id = None
    assert stop_token_ids(str(tmp_path), tokenizer) == ()


_LONG = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "original_max_position_embeddings": 16}
_CHUNKS = {"head_dim": 8, "attention_chunk_size": 16, "floor_scale": 32}


@pytest.mark.parametrize(
    ("family", "changes", "context", "packed", "key"),
    [
        ("llama", {}, 64, None, "max_position_embeddings"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}},
            64,
            None,
            "max_position_embeddings",
        ),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}},
            64,
            64,
            "max_position_embeddings",
        ),
        (
            "phi3",
            {"original_max_position_embeddings": 16, "rope_parameters": _LONG | {"rope_theta": 1e4}},
            16,
            16,
            "rope_parameters.original_max_position_embeddings",
        ),
        ("llama4_text", _CHUNKS, 16, 16, "attention_chunk_size"),
        ("llama4_text", _CHUNKS | {"floor_scale": 8}, 7, 7, "floor_scale"),
    ],
)
def test_a_row_is_limited_by_what_depends_on_its_length(family, changes, context, packed, key):
    config = tiny_config(family, **changes)
    assert (context_limit(config).tokens, context_limit(config).key) == (context, key)
    limit = packed_limit(config)
    assert (limit and limit.tokens) == packed
    if packed is not None:
        assert str(limit).startswith(f"{packed} ({limit.key}: ")
