"""A server that follows a run: newer checkpoints are served without a restart, and no answer mixes two."""

from __future__ import annotations

import threading
from functools import partial

import pytest
import torch
from helpers.serving import HANG_S, SERVED, load_served, save_served_model, serving
from helpers.tiny import tiny_model

from lockstep.checkpoint.folders import make_draft, publish, write_state
from lockstep.tools.serve import listen, listening_socket, main
from lockstep.tools.serve.queue import newer_weights


def write_checkpoint(run, step, seed):
    draft = make_draft(run, step)
    save_served_model(draft / "actor", seed)
    write_state(draft, {"global_steps": step})
    return publish(draft, {})


def greedy(seed, prompt, count):
    """What the tiny model of `seed` says, by plain forward passes."""
    model, ids = tiny_model(seed=seed, **SERVED), list(prompt)
    with torch.no_grad():
        for _ in range(count):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def test_newer_checkpoints_are_served_between_requests(tmp_path):
    write_checkpoint(tmp_path, 1, seed=2)
    loaded = load_served(str(tmp_path))
    expected = {step: greedy(seed, [65, 66], 40) for step, seed in ((1, 2), (2, 3))}
    names = {}
    with serving(loaded, newer=partial(newer_weights, str(tmp_path)), follow_s=0.05) as client:
        name = client.server.vocabulary.name
        names = {step: [name(token) for token in tokens] for step, tokens in expected.items()}

        def ask():
            body = {"prompt": [65, 66], "max_tokens": 40, "temperature": 0, "ignore_eos": True, "logprobs": 0}
            return client.complete(**body)["choices"][0]["logprobs"]["tokens"]

        assert ask() == names[1]
        found, stop = [], threading.Event()
        asking = threading.Thread(target=lambda: [found.append(ask()) for _ in iter(stop.is_set, True)])
        asking.start()
        write_checkpoint(tmp_path, 2, seed=3)
        try:
            for _ in iter(lambda: client.get("/v1/models/tiny")[1]["step"], 2):
                stop.wait(0.02)
        finally:
            stop.set()
            asking.join(HANG_S)
        assert ask() == names[2]
        assert all(answer in names.values() for answer in found)


def test_a_checkpoint_that_cannot_be_read_changes_nothing(tmp_path, capsys):
    write_checkpoint(tmp_path, 1, seed=2)
    with serving(load_served(str(tmp_path)), newer=partial(newer_weights, str(tmp_path)), follow_s=0.01) as client:
        before = client.complete(prompt="ab", temperature=0)["choices"]
        (tmp_path / "global_step_2").mkdir()
        write_state(tmp_path / "global_step_2", {"global_steps": 2})
        seen = ""
        while "could not be loaded" not in seen:
            seen += capsys.readouterr().out
        assert client.complete(prompt="ab", temperature=0)["choices"] == before
        assert client.get("/health")[0] == 200


def test_a_reader_that_breaks_down_is_said_and_the_next_checkpoint_is_served(tmp_path, capsys):
    """Whatever it raises: a library's own exceptions are many."""
    write_checkpoint(tmp_path, 1, seed=2)
    tries = []

    def newer(loaded):
        tries.append(loaded.source.step)
        if len(tries) == 1:
            raise KeyError("a tensor")
        return newer_weights(str(tmp_path), loaded)

    with serving(load_served(str(tmp_path)), newer=newer, follow_s=0.01) as client:
        write_checkpoint(tmp_path, 2, seed=3)
        for _ in iter(lambda: client.get("/v1/models/tiny")[1]["step"], 2):
            threading.Event().wait(0.02)
    assert "could not be loaded, the one before goes on: KeyError('a tensor')" in capsys.readouterr().out


def test_only_a_run_can_be_followed(tmp_path, capsys):
    folder = save_served_model(tmp_path)
    (tmp_path / "model.safetensors").unlink()  # said before anything is loaded
    assert main([folder, "--follow", "--port", "0", "--device", "cpu"]) == 1
    assert "--follow needs a run's folder" in capsys.readouterr().err


def test_of_two_servers_that_bind_one_port_before_either_listens_the_second_says_so(tmp_path, capsys, monkeypatch):
    with listening_socket("127.0.0.1", 0, 60.0) as other:
        port = other.getsockname()[1]
        # What takes the time in which another server, started together with this one, comes first.
        monkeypatch.setattr("lockstep.tools.serve.load_model_of", lambda options: listen(other) or load_served(options.model))
        assert main([save_served_model(tmp_path), "--port", str(port)]) == 1
    assert f"cannot listen on 127.0.0.1:{port}: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"), [(["--max-queue", "-1"], "--max-queue=-1"), (["--host", "1.2.3.4"], "cannot listen on 1.2.3.4")]
)
def test_what_cannot_work_is_said_before_anything_is_loaded(arguments, message, capsys):
    assert main(["no/such/model", "--port", "0", *arguments]) == 1
    assert message in capsys.readouterr().err
