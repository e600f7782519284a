"""A real server in a thread of the test, and a client of a few lines."""

from __future__ import annotations

import dataclasses
import http.client
import json
import queue
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from helpers.tiny import tiny_model
from lockstep.config.actor_rollout_ref import RolloutConfig
from lockstep.tools.load_model import LoadedModel, find_model, load
from lockstep.tools.serve import http_server, listening_socket
from lockstep.tools.serve.app import Server, ServerOptions
from lockstep.tools.serve.limits import RequestLimits
from lockstep.workers.rollout.request import Completion

HANG_S = 60.0
"""Longer than anything here takes: only a hang meets it."""

_LIMITS = {one.name for one in dataclasses.fields(RequestLimits)}

TEMPLATE = (
    "{% if tools %}{% for tool in tools %}[{{ tool['function']['name'] }}]{% endfor %}{% endif %}"
    "{% for m in messages %}{% if m['role'] == 'nobody' %}{{ raise_exception('nobody may not speak') }}{% endif %}"
    "<turn>{{ m['role'] }}:{{ m['content'] }}"
    "{% if 'tool_calls' in m %}{% for call in m['tool_calls'] %}<{{ call.function.name }}>{{ call.function.arguments | tojson }}"
    "{% endfor %}{% endif %}{% endfor %}{% if add_generation_prompt %}<turn>{% endif %}"
)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token for each byte, so that every character beyond ASCII is cut, an end token (256) and one for turns (257)."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<end>", additional_special_tokens=["<turn>"])
    tokenizer.chat_template = TEMPLATE
    return tokenizer


SERVED: dict[str, Any] = {"vocab_size": 258, "max_position_embeddings": 256, "eos_token_id": 256}


def save_served_model(folder: Path, seed: int = 2) -> str:
    """Write a tiny model with `byte_tokenizer`; returns the path."""
    tiny_model(seed=seed, **SERVED).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return str(folder)


class Client:
    """Requests to one server; `port` is the connection's."""

    def __init__(self, port: int, server: Server) -> None:
        self.port, self.server = port, server

    def open(self, method: str, path: str, body: Any = None, **headers: str) -> http.client.HTTPResponse:
        """A request; its response is to be read. `body`: bytes as they are, anything else as JSON."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=HANG_S)
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        given = {"Content-Type": "application/json"} | {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, path, data, given)
        return connection.getresponse()

    def get(self, path: str, **headers: str) -> tuple[int, Any]:
        """Status and body."""
        return _read(self.open("GET", path, **headers))

    def post(self, path: str, body: Any, **headers: str) -> tuple[int, Any]:
        """Status and body."""
        return _read(self.open("POST", path, body, **headers))

    def complete(self, **body: Any) -> dict[str, Any]:
        """A completion that works."""
        status, answer = self.post("/v1/completions", body)
        assert status == 200, answer
        return answer

    def events(self, path: str, **body: Any) -> list[dict[str, Any]]:
        """All events of a stream, which must end as streams do."""
        response = self.open("POST", path, body | {"stream": True})
        assert response.status == 200
        lines = response.read().decode().split("\n\n")
        assert lines[-2:] == ["data: [DONE]", ""]
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]

    def gauge(self, name: str) -> float:
        """A number of /metrics."""
        lines = self.open("GET", "/metrics").read().decode().splitlines()
        return next(float(line.split()[-1]) for line in lines if line.startswith(f"lockstep_{name} "))


def _read(response: http.client.HTTPResponse) -> tuple[int, Any]:
    text = response.read()
    return response.status, json.loads(text) if response.headers.get_content_type() == "application/json" else text.decode()


def load_served(path: str, **rollout: Any) -> LoadedModel:
    """The model of a folder, on the CPU."""
    return load(find_model(path), RolloutConfig(**rollout), device="cpu")


@contextmanager
def serving(loaded: LoadedModel, **options: Any) -> Iterator[Client]:
    """Inside, the model is served; the engine's thread has ended afterwards."""
    limits = RequestLimits(**{name: options.pop(name) for name in _LIMITS & options.keys()})
    server = Server(loaded, ServerOptions(**{"name": "tiny", "num_tokens": 4096, "limits": limits} | options))
    with listening_socket("127.0.0.1", 0, HANG_S) as bound:
        http = http_server(server, "a test")
        thread = threading.Thread(target=http.run, kwargs={"sockets": [bound]}, daemon=True)
        thread.start()
        try:
            while not http.started and thread.is_alive():
                thread.join(0.01)
            assert http.started, "the server did not start"
            yield Client(bound.getsockname()[1], server)
        finally:
            http.should_exit = True
            thread.join(HANG_S)
            assert not thread.is_alive(), "the server does not end"


class Script:
    """A stream of an engine whose answers the test gives. `next` raises an exception that is among them."""

    num_running = num_waiting = num_pages = num_free_pages = num_kept_pages = 0

    def __init__(self):
        self.added, self.aborted, self._answers, self._count = queue.Queue(), queue.Queue(), queue.Queue(), 0

    def add(self, request):
        index, self._count = self._count, self._count + 1
        self.added.put((index, request))
        return index

    def abort(self, index):
        self.aborted.put(index)
        self._answers.put(completion(index, "abort"))

    def answer(self, answer):
        self._answers.put(answer)

    def next(self, timeout_s):
        try:
            answer = self._answers.get(timeout=timeout_s)
        except queue.Empty:
            return None
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def close(self):
        pass


def completion(index, reason="stop", text="ab", **more):
    ids = torch.tensor(byte_tokenizer().encode(text))
    return Completion(index, ids, torch.zeros(len(ids)), reason, 0, **more)


_POOL = ThreadPoolExecutor(4)


def in_thread(function, *arguments, **keywords):
    """The future result of a call."""
    return _POOL.submit(function, *arguments, **keywords)


ASK = {"prompt": "a", "max_tokens": 5}
