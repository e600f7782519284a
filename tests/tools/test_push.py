import pytest
from helpers.tiny import save_tiny_model

from lockstep import cli
from lockstep.tools import push


class Hub:
    """What was asked of the hub."""

    def __init__(self, fails=None):
        self.asked, self.fails = [], fails

    def __getattr__(self, name):
        def call(*args, **kwargs):
            self.asked.append((name, args, kwargs))
            if name == self.fails:
                raise OSError("[Errno -2] Name or service not known\nmore of it")
            if name == "upload_folder":
                self.files = {path.name for path in kwargs["folder_path"].iterdir()}
            return "https://hub/me/mine"

        return call


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("push") / "model")


@pytest.fixture
def hub(monkeypatch):
    """`hub(fails)`: the hub that is used, whose call of that name raises."""
    monkeypatch.setattr("huggingface_hub.get_token", lambda: "token")
    monkeypatch.setattr("huggingface_hub.is_offline_mode", lambda: False)

    def make(fails=None):
        made = Hub(fails)
        monkeypatch.setattr("huggingface_hub.HfApi", lambda: made)
        return made

    return make


def test_a_model_is_exported_and_uploaded(hub, model, capsys):
    used = hub()
    assert push.main([model, "me/mine", "--private", "--dtype", "float32"]) == 0
    names = [name for name, _, _ in used.asked]
    assert names == ["whoami", "create_repo", "upload_folder"]
    assert used.asked[1][1:] == (("me/mine",), {"private": True, "exist_ok": True})
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= used.files
    assert capsys.readouterr().out == "the model in float32: https://hub/me/mine\n"


@pytest.mark.parametrize(
    ("fails", "message"),
    [
        ("whoami", "error: the hub cannot be reached, or does not know the token: [Errno -2] Name or service not known\n"),
        ("create_repo", "error: the hub does not let you write me/mine: [Errno -2] Name or service not known\n"),
    ],
)
def test_without_network_or_rights_it_is_one_line_before_anything_is_read(hub, model, capsys, monkeypatch, fails, message):
    hub(fails)
    monkeypatch.setattr(push, "export", lambda *args: pytest.fail("exported"))
    assert push.main([model, "me/mine"]) == 1
    assert capsys.readouterr().err == message


def test_without_a_token_offline_without_a_model_or_with_a_wrong_name_nothing_is_asked(hub, model, tmp_path, capsys, monkeypatch):
    used = hub()
    assert push.main([model, "mine"]) == 1
    assert push.main([str(tmp_path / "none"), "me/mine"]) == 1
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    assert push.main([model, "me/mine"]) == 1
    monkeypatch.setattr("huggingface_hub.is_offline_mode", lambda: True)
    assert push.main([model, "me/mine"]) == 1
    wrong, missing, token, offline = capsys.readouterr().err.splitlines()
    assert "expected OWNER/NAME" in wrong
    assert "is not a model folder on this machine" in missing
    assert "set HF_TOKEN, or run hf auth login" in token
    assert "HF_HUB_OFFLINE" in offline
    assert used.asked == []
    assert cli.COMMANDS["push"][0] == push.main.__module__
