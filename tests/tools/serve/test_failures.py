"""What goes wrong: clients that leave, engines that break, queues that are full, wrong keys. The engine is a script of the test."""

from __future__ import annotations

import asyncio
import json
import queue
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from helpers.serving import HANG_S, byte_tokenizer, serving

from lockstep.tools.load_model import LoadedModel, ModelSource
from lockstep.tools.serve.desk import Desk, EngineBroken
from lockstep.workers.rollout.base import failed
from lockstep.workers.rollout.request import Completion
from lockstep.workers.rollout.stream import Tokens


class Script:
    """A stream whose answers the test gives. `next` raises an exception that is among them."""

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


def completion(index, reason="stop", text="ab"):
    ids = torch.tensor(byte_tokenizer().encode(text))
    return Completion(index, ids, torch.zeros(len(ids)), reason, 0)


@pytest.fixture
def script():
    return Script()


@pytest.fixture
def serve(script):
    """`serve(options...)`: a server over the script, with two seats and no queue beside them."""
    engine = SimpleNamespace(vocabulary=258, context=256, seats=2, open=lambda sampling, num_tokens: script)
    loaded = LoadedModel(ModelSource("none"), byte_tokenizer(), engine, (256,))
    return lambda **options: serving(loaded, **{"max_queue": 0} | options)


POOL = ThreadPoolExecutor(4)


def in_thread(function, *arguments, **keywords):
    """The future result of a call."""
    return POOL.submit(function, *arguments, **keywords)


ASK = {"prompt": "a", "max_tokens": 5}


def test_a_full_queue_is_said_and_ends_nothing_else(serve, script):
    with serve() as client:
        waiting = [in_thread(client.complete, **ASK) for _ in range(2)]
        indices = [script.added.get(timeout=HANG_S)[0] for _ in waiting]
        response = client.open("POST", "/v1/completions", ASK)
        assert response.status == 429
        assert response.headers["Retry-After"] == "1"
        assert json.loads(response.read())["error"]["code"] == "queue_full"
        assert client.post("/v1/completions", ASK | {"n": 3})[0] == 400  # never, however long it waits
        for index in indices:
            script.answer(completion(index))
        assert [future.result(HANG_S)["choices"][0]["text"] for future in waiting] == ["ab", "ab"]
        again = in_thread(client.complete, **ASK)
        script.answer(completion(script.added.get(timeout=HANG_S)[0]))
        assert again.result(HANG_S)["choices"][0]["text"] == "ab"
        assert client.gauge("requests_open") == 0


def test_a_broken_engine_answers_all_and_health_says_so(serve, script, capsys):
    with serve() as client:
        whole = in_thread(client.post, "/v1/completions", ASK)
        script.added.get(timeout=HANG_S)
        response = client.open("POST", "/v1/completions", ASK | {"stream": True})
        script.answer(ZeroDivisionError("in the engine"))
        status, body = whole.result(HANG_S)
        assert (status, body["error"]["code"]) == (500, "engine_broken")
        assert "in the engine" in body["error"]["message"]
        assert response.status == 200  # it had been sent
        assert json.loads(response.read().decode().removeprefix("data: "))["error"]["code"] == "engine_broken"
        assert client.post("/v1/completions", ASK)[0] == 500
        status, body = client.get("/health")
        assert (status, body["status"]) == (503, "broken")
        assert client.gauge("engine_up") == 0
    assert "ZeroDivisionError" in capsys.readouterr().err


async def start_change(desk):
    """A change of the engine that has been asked for, and an order that waits for it."""
    tasks = [asyncio.ensure_future(desk.change(lambda: None)), asyncio.ensure_future(desk.order([None]))]
    await asyncio.sleep(0)
    return tasks


async def refused(tasks):
    """Whether all of these raise EngineBroken, and none waits for ever."""
    ended = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), HANG_S)
    return all(isinstance(one, EngineBroken) for one in ended)


def test_newer_weights_for_a_broken_engine_hold_up_no_request(script, capsys):
    async def break_and_change():
        desk = Desk(lambda: script, 10)
        await desk.order([None])  # in flight, so that the first change waits
        tasks = await start_change(desk)
        script.answer(ZeroDivisionError("in the engine"))
        assert await refused(tasks)
        assert await refused(await start_change(desk))
        await desk.close()

    asyncio.run(break_and_change())
    assert "ZeroDivisionError" in capsys.readouterr().err


def test_a_change_that_fails_breaks_the_engine(script, capsys):
    async def change():
        desk = Desk(lambda: script, 10)
        with pytest.raises(EngineBroken, match="ZeroDivisionError"):
            await asyncio.wait_for(desk.change(lambda: 1 // 0), HANG_S)
        assert await refused([desk.order([None])])
        await desk.close()

    asyncio.run(change())
    assert "ZeroDivisionError" in capsys.readouterr().err


def test_a_request_that_fails_ends_no_other(serve, script):
    with serve() as client:
        bad = in_thread(client.post, "/v1/completions", ASK)
        index, request = script.added.get(timeout=HANG_S)
        good = in_thread(client.complete, **ASK)
        script.answer(failed(index, request, "the model's logits are not finite", 0))
        status, body = bad.result(HANG_S)
        assert (status, body["error"]["code"]) == (500, "no_answer")
        assert "not finite" in body["error"]["message"]
        script.answer(completion(script.added.get(timeout=HANG_S)[0]))
        assert good.result(HANG_S)["choices"][0]["text"] == "ab"


@pytest.mark.parametrize("stream", [False, True])
def test_a_deadline_ends_a_request(serve, script, stream):
    with serve(timeout_s=0.2) as client:
        response = client.open("POST", "/v1/completions", ASK | {"stream": stream})
        body = json.loads(response.read().decode().removeprefix("data: "))
        assert (response.status, body["error"]["code"]) == (200 if stream else 504, "deadline")
        assert script.aborted.get(timeout=HANG_S) == script.added.get(timeout=HANG_S)[0]


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_is_aborted(serve, script, stream):
    with serve() as client:
        body = json.dumps(ASK | {"stream": stream, "n": 2}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        with socket.create_connection(("127.0.0.1", client.port), HANG_S) as connection:
            connection.sendall(head.encode() + body)
            indices = {script.added.get(timeout=HANG_S)[0] for _ in range(2)}
            if stream:
                script.answer(Tokens(min(indices), torch.tensor([65]), torch.zeros(1)))
                assert connection.recv(10)
        assert {script.aborted.get(timeout=HANG_S) for _ in range(2)} == indices
        again = in_thread(client.complete, **ASK)
        index = script.added.get(timeout=HANG_S)[0]
        script.answer(completion(index))
        assert again.result(HANG_S)["choices"][0]["text"] == "ab"
        assert client.gauge("requests_open") == 0


def test_half_a_request_holds_up_nobody(serve, script):
    with serve() as client, socket.create_connection(("127.0.0.1", client.port), HANG_S) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 90\r\n\r\n{"
        )
        assert client.get("/health")[0] == 200


@pytest.mark.parametrize("rest", [b"0\r\n\r\n", (b"65\r\n" + b" " * 0x65 + b"\r\n") * 64])
def test_a_body_without_a_length_is_limited_too(serve, rest):
    with serve(max_body_bytes=100) as client, socket.create_connection(("127.0.0.1", client.port), HANG_S) as connection:
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
        connection.sendall(head.encode() + b"65\r\n" + b" " * 0x65 + b"\r\n" + rest)
        assert connection.recv(100).startswith(b"HTTP/1.1 413 ")


def test_a_key_is_asked_for_everywhere_but_at_the_door(serve):
    with serve(api_key="s\u00e9cret") as client:
        assert client.get("/health")[0] == 200
        for path in ("/v1/models", "/metrics", "/tokenizer_info", "/other"):
            for headers in ({}, {"Authorization": "Bearer secret"}, {"Authorization": "s\u00e9cret"}):
                status, body = client.get(path, **headers)
                assert (status, body["error"]["code"]) == (401, "invalid_api_key"), (path, headers)
        right = "Bearer s\u00e9cret".encode().decode("latin-1")
        assert client.get("/v1/models", Authorization=right)[0] == 200


def test_who_still_waits_when_the_server_ends_is_told(serve, script, monkeypatch):
    monkeypatch.setattr("lockstep.tools.serve.GRACE_S", 0.05)
    with serve() as client:
        whole = in_thread(client.post, "/v1/completions", ASK)
        streamed = in_thread(lambda: client.open("POST", "/v1/completions", ASK | {"stream": True}).read())
        indices = {script.added.get(timeout=HANG_S)[0] for _ in range(2)}
    status, body = whole.result(HANG_S)
    assert (status, body["error"]["code"]) == (503, "shutting_down")
    last = streamed.result(HANG_S).decode().split("\n\n")[-2]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "shutting_down"
    assert {script.aborted.get(timeout=HANG_S) for _ in range(2)} == indices


def test_threads_of_a_server_end_with_it(serve):
    before = set(threading.enumerate())
    with serve() as client:
        assert client.post("/tokenize", {"prompt": "a"})[0] == 200
    started = set(threading.enumerate()) - before
    for thread in started:
        thread.join(HANG_S)
    assert not [thread.name for thread in started if thread.is_alive()]
