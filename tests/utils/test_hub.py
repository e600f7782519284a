import socket

import pytest
from huggingface_hub import constants

from lockstep.errors import DataError
from lockstep.utils.hub import check_hub


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
