from __future__ import annotations

import json

import huggingface_hub.constants
import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from lockstep.embedded.task import make_tokenizer
from lockstep.errors import DataError
from lockstep.utils.tokenizer import hf_tokenizer, separate_padding


def test_a_tokenizer_without_pad_token_pads_with_its_end_token(plain_tokenizer, tmp_path):
    plain_tokenizer.save_pretrained(tmp_path)
    loaded = hf_tokenizer(str(tmp_path))
    assert loaded.pad_token_id == loaded.eos_token_id == plain_tokenizer.eos_token_id
    assert loaded.encode("w1 w2") == plain_tokenizer.encode("w1 w2")


def test_a_pad_token_that_is_there_stays(plain_tokenizer, tmp_path):
    plain_tokenizer.pad_token = "w7"
    plain_tokenizer.save_pretrained(tmp_path)
    assert hf_tokenizer(str(tmp_path)).pad_token == "w7"


def test_neither_pad_nor_end_token_is_an_error(plain_tokenizer, tmp_path):
    plain_tokenizer.eos_token = None
    plain_tokenizer.save_pretrained(tmp_path)
    with pytest.raises(DataError, match="neither pad_token nor eos_token"):
        hf_tokenizer(str(tmp_path))


@pytest.mark.parametrize(
    "files",
    [{}, {"config.json": json.dumps({"model_type": "qwen2"})}, {"tokenizer.json": "{broken"}],
    ids=["empty folder", "model config alone", "broken file"],
)
def test_a_folder_without_a_usable_tokenizer_is_named(tmp_path, files):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=str(tmp_path)) as caught:
        hf_tokenizer(str(tmp_path))
    assert "expected" in str(caught.value)
    assert ("copy tokenizer.json" in str(caught.value)) == (not files)
    assert "\n" not in str(caught.value)


def test_a_path_that_does_not_exist_never_asks_the_hub(tmp_path):
    for path in (str(tmp_path / "absent"), "./absent", "~/absent/model"):
        with pytest.raises(DataError, match="does not exist"):
            hf_tokenizer(path)


def test_a_hub_id_out_of_reach_is_one_clear_line(monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", lambda *a, **k: pytest.fail("it would try for half a minute"))
    with pytest.raises(DataError, match="no-such-owner/no-such-model is not a folder and not in the Hugging Face cache") as caught:
        hf_tokenizer("no-such-owner/no-such-model")
    assert "\n" not in str(caught.value)


def test_padding_is_made_another_token_than_the_end():
    tokenizer = make_tokenizer()
    separate_padding(tokenizer)
    assert tokenizer.pad_token == "<pad>"
    tokenizer.pad_token = tokenizer.eos_token
    separate_padding(tokenizer)
    assert tokenizer.pad_token == "<user>"
    lone = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"<eos>": 0, "a": 1}, "a")), eos_token="<eos>")
    lone.pad_token = "<eos>"
    with pytest.raises(DataError, match="no special token beside its end token '<eos>'"):
        separate_padding(lone)
