"""What goes wrong: clients that leave, engines that break, queues that are full, wrong keys. The engine is a script of the test."""

from __future__ import annotations

import asyncio
import json
import math
import queue
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from helpers.serving import HANG_S, byte_tokenizer, serving

from lockstep.tools.load_model import LoadedModel, ModelSource
from lockstep.tools.serve.queue import RequestQueue
from lockstep.tools.serve.schema import EngineBroken, ShuttingDown
from lockstep.tools.serve.text import PromptReader
from lockstep.workers.rollout.request import Completion, Tokens, failed


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


def completion(index, reason="stop", text="ab", **more):
    ids = torch.tensor(byte_tokenizer().encode(text))
    return Completion(index, ids, torch.zeros(len(ids)), reason, 0, **more)


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


async def submitted(queue_):
    """A call of one request, which the engine has."""
    call = queue_.admit(1)
    await call.submit([None])
    return call


async def start_change(queue_):
    """A change of the engine that has been asked for, and a call that waits for it."""
    tasks = [asyncio.ensure_future(queue_.change(lambda: None)), asyncio.ensure_future(submitted(queue_))]
    await asyncio.sleep(0)
    return tasks


async def refused(tasks):
    """Whether all of these raise EngineBroken, and none waits for ever."""
    ended = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), HANG_S)
    return all(isinstance(one, EngineBroken) for one in ended)


def test_newer_weights_for_a_broken_engine_hold_up_no_request(script, capsys):
    async def break_and_change():
        queue_ = RequestQueue(lambda: script, 10)
        await submitted(queue_)  # in flight, so that the first change waits
        tasks = await start_change(queue_)
        script.answer(ZeroDivisionError("in the engine"))
        assert await refused(tasks)
        assert await refused(await start_change(queue_))
        await queue_.close()

    asyncio.run(break_and_change())
    assert "ZeroDivisionError" in capsys.readouterr().err


def test_a_change_that_fails_breaks_the_engine(script, capsys):
    async def change():
        queue_ = RequestQueue(lambda: script, 10)
        with pytest.raises(EngineBroken, match="ZeroDivisionError"):
            await asyncio.wait_for(queue_.change(lambda: 1 // 0), HANG_S)
        assert await refused([submitted(queue_)])
        await queue_.close()

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
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        with socket.create_connection(("127.0.0.1", client.port), HANG_S) as connection:
            connection.sendall(head.encode() + body)
            indices = {script.added.get(timeout=HANG_S)[0] for _ in range(2)}
            if stream:
                script.answer(Tokens(min(indices), torch.tensor([65]), torch.zeros(1)))
                assert connection.recv(10)
        assert {script.aborted.get(timeout=HANG_S) for _ in range(2)} == indices
        while client.gauge("requests_open"):
            pass
        again = in_thread(client.complete, **ASK)
        index = script.added.get(timeout=HANG_S)[0]
        script.answer(completion(index))
        assert again.result(HANG_S)["choices"][0]["text"] == "ab"
        assert client.gauge("requests_open") == 0


class Reading:
    """Stands in for `PromptReader.encode`: a text that takes until `finish` is set."""

    def __init__(self, monkeypatch):
        self.began = queue.Queue()
        self.finish = threading.Event()
        encode = PromptReader.encode

        def slowly(reader, text, add_special_tokens):
            if "slow" in text:
                self.began.put(text)
                assert self.finish.wait(HANG_S)
            return encode(reader, text, add_special_tokens)

        monkeypatch.setattr(PromptReader, "encode", slowly)


@pytest.fixture
def reading(monkeypatch):
    reading = Reading(monkeypatch)
    yield reading
    reading.finish.set()


LONG = {"prompt": "slow", "stop": ["x" * 70_000]}
"""A long body whose prompt is not too long."""


@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize"])
def test_requests_that_wait_to_be_read_count_in_the_queue_and_hold_up_no_short_one(serve, script, reading, path):
    with serve(max_queue=1) as client:  # three may be here
        body = LONG if path == "/v1/completions" else {"prompt": "slow" + "x" * 70_000}
        first = in_thread(client.post, path, body)
        reading.began.get(timeout=HANG_S)
        second = in_thread(client.post, path, body)
        while client.gauge("requests_open") < 2:
            pass
        short = in_thread(client.complete, **ASK)
        script.answer(completion(script.added.get(timeout=HANG_S)[0]))
        assert short.result(HANG_S)["choices"][0]["text"] == "ab"
        whole = in_thread(client.complete, **ASK)
        index = script.added.get(timeout=HANG_S)[0]
        for more, wanted in ((ASK, 429), (body, 429)):
            assert client.post(path if more is body else "/v1/completions", more)[0] == wanted
        script.answer(completion(index))
        whole.result(HANG_S)
        reading.finish.set()
        if path == "/v1/completions":
            for _ in range(2):
                script.answer(completion(script.added.get(timeout=HANG_S)[0]))
        assert [future.result(HANG_S)[0] for future in (first, second)] == [200, 200]
        assert client.gauge("requests_open") == 0


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize"])
def test_what_nobody_waits_for_is_not_read(serve, script, reading, path):
    with serve(max_queue=8) as client:
        slow = {"messages": [{"role": "user", "content": "slow"}]} if "chat" in path else {"prompt": "slow"}
        if path == "/v1/completions":
            slow = {"prompt": ["slow", "slow"]}
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: "
        data = json.dumps(slow).encode()
        connections = [socket.create_connection(("127.0.0.1", client.port), HANG_S) for _ in range(3)]
        for connection in connections:
            connection.sendall(f"{head}{len(data)}\r\n\r\n".encode() + data)
        reading.began.get(timeout=HANG_S)
        while client.gauge("requests_open") < (6 if path == "/v1/completions" else 3):
            pass
        for connection in connections:
            connection.close()
        while client.gauge("requests_open"):
            pass
        reading.finish.set()
        answer = in_thread(client.complete, **ASK)
        script.answer(completion(script.added.get(timeout=HANG_S)[0]))
        assert answer.result(HANG_S)["choices"][0]["text"] == "ab"
        assert reading.began.empty()


def test_a_deadline_ends_the_reading_too(serve, reading):
    with serve(timeout_s=0.2) as client:
        for path in ("/v1/completions", "/tokenize"):
            status, body = client.post(path, {"prompt": "slow"})
            assert (status, body["error"]["code"]) == (504, "deadline")
            assert client.gauge("requests_open") == 0


def test_a_text_that_cannot_fit_is_not_tokenised(serve, reading):
    with serve() as client:
        text = "slow" + "a" * 256 * len("<turn>")
        for path, body in (
            ("/v1/completions", {"prompt": text}),
            ("/v1/completions", {"prompt": ["a", text]}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": text}]}),
        ):
            status, answer = client.post(path, body)
            assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
        assert client.post("/tokenize", {"prompt": text + "a" * (1 << 20)})[0] == 400
        assert client.post("/detokenize", {"tokens": [65] * (1 << 17)})[0] == 400
        assert reading.began.empty()


def test_detokenising_holds_up_no_other_request(serve, monkeypatch):
    finish = threading.Event()
    began = threading.Event()

    def slowly(reader, ids):
        began.set()
        assert finish.wait(HANG_S)
        return "text"

    monkeypatch.setattr(PromptReader, "decode", slowly)
    with serve() as client:
        slow = in_thread(client.post, "/detokenize", {"tokens": [65]})
        assert began.wait(HANG_S)
        try:
            assert client.get("/health")[0] == 200
        finally:
            finish.set()
        assert slow.result(HANG_S) == (200, {"prompt": "text"})


@pytest.mark.parametrize("ignores", [False, True])
def test_ignore_eos_leaves_out_the_models_end_tokens_alone(serve, script, ignores):
    with serve() as client:
        answer = in_thread(client.complete, **ASK, ignore_eos=ignores, stop_token_ids=[66])
        index, request = script.added.get(timeout=HANG_S)
        script.answer(completion(index))
        answer.result(HANG_S)
        assert set(request.sampling.stop_token_ids) == ({66} if ignores else {66, 256})


@pytest.mark.parametrize("stream", [False, True])
def test_no_more_likely_tokens_are_shown_than_were_asked_for(serve, script, stream):
    """Engines may give one more, and numbers that JSON does not have."""
    ids = byte_tokenizer().encode("abcde")
    log_probs = [0.0, -math.inf, -2.0, -3.0, -4.0]
    likely = [list(zip(order, log_probs, strict=True)) for order in (ids, [ids[1], ids[0], *ids[2:]])]
    with serve() as client:
        for path, body in (
            ("/v1/completions", {"prompt": "a", "logprobs": 3}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "logprobs": True, "top_logprobs": 3}),
        ):
            ask = client.events if stream else client.post
            answer = in_thread(ask, path, **body) if stream else in_thread(ask, path, body)
            index = script.added.get(timeout=HANG_S)[0]
            if stream:
                script.answer(Tokens(index, torch.tensor(ids[:2]), torch.zeros(2), likely))
            script.answer(completion(index, top_log_probs=likely))
            found = answer.result(HANG_S)
            choices = [event["choices"][0] for event in found] if stream else found[1]["choices"]
            log_probs = next(choice["logprobs"] for choice in choices if choice["logprobs"])
            if "content" in log_probs:
                shown = [[(top["token"], top["logprob"]) for top in entry["top_logprobs"]] for entry in log_probs["content"]]
            else:
                shown = [list(top.items()) for top in log_probs["top_logprobs"]]
            assert shown == [[("a", 0.0), ("c", -2.0)], [("b", 0.0), ("c", -2.0)]]


@pytest.mark.parametrize("stream", [False, True])
def test_text_is_cut_only_where_the_engine_stopped(serve, script, stream):
    """With special tokens left out, "ad" is in the text; the engine saw "a<end>d"."""
    with serve() as client:
        body = {"prompt": "a", "stop": ["ad"], "ignore_eos": True}
        answer = in_thread(client.events, "/v1/completions", **body) if stream else in_thread(client.complete, **body)
        index = script.added.get(timeout=HANG_S)[0]
        done = completion(index, "length", "xa<end>dy")
        if stream:
            script.answer(Tokens(index, done.ids, done.log_probs))
        script.answer(done)
        found = answer.result(HANG_S)
        text = "".join(choice["text"] for event in (found if stream else [found]) for choice in event["choices"])
        assert text == "xady"


ADDRESSES = ("127.0.0.1", "127.0.0.1:80", "localhost", "LOCALHOST:8000", "[::1]:8000", "[::1]", "10.0.0.7:1", socket.gethostname())


def test_a_name_that_is_made_to_lead_here_is_refused(serve):
    """Otherwise a web page of that name reads the server's answers in the browser of a user of this machine."""
    with serve(allowed_hosts=["Serve.Example"]) as client:
        for host in (*ADDRESSES, "serve.example", "serve.example:8000"):
            assert client.get("/v1/models", Host=host)[0] == 200, host
        for host in (
            "evil.example",
            "evil.example:8000",
            "localhost.evil.example",
            "127.0.0.1.evil.example",
            "evil:1:2",
            "[::1].evil",
            "",
        ):
            for path in ("/v1/models", "/metrics", "/health", "/"):
                status, body = client.get(path, Host=host)
                assert (status, body["error"]["code"]) == (403, "host_not_allowed"), host
    with serve(allowed_hosts=["*"]) as client:
        assert client.get("/v1/models", Host="any.example")[0] == 200
    with serve(api_key="secret") as client:  # which the page does not know
        assert client.get("/v1/models", Host="any.example", Authorization="Bearer secret")[0] == 200
        assert client.get("/v1/models", Host="any.example")[0] == 401


def test_half_a_request_holds_up_nobody(serve, script):
    with serve() as client, socket.create_connection(("127.0.0.1", client.port), HANG_S) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 90\r\n\r\n{"
        )
        assert client.get("/health")[0] == 200


@pytest.mark.parametrize("rest", [b"0\r\n\r\n", (b"65\r\n" + b" " * 0x65 + b"\r\n") * 64])
def test_a_body_without_a_length_is_limited_too(serve, rest):
    with serve(max_body_bytes=100) as client, socket.create_connection(("127.0.0.1", client.port), HANG_S) as connection:
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
        connection.sendall(head.encode() + b"65\r\n" + b" " * 0x65 + b"\r\n" + rest)
        assert connection.recv(100).startswith(b"HTTP/1.1 413 ")


def test_a_key_is_asked_for_everywhere_but_at_the_door(serve):
    with serve(api_key="s\u00e9cret") as client:
        assert client.get("/health")[0] == 200
        for path in ("/v1/models", "/metrics", "/tokenizer_info", "/other"):
            right = "Bearer s\u00e9cret".encode().decode("latin-1")
            wrong = ("", "Bearer secret", "s\u00e9cret", "Bearer ", f"{right}x", right[:-1], right.upper())
            for headers in ({}, *({"Authorization": value} for value in wrong)):
                status, body = client.get(path, **headers)
                assert (status, body["error"]["code"]) == (401, "invalid_api_key"), (path, headers)
        assert client.get("/v1/models", Authorization=right)[0] == 200


def test_shutting_down_ends_what_the_engine_computes_at_once(script):
    async def give_up():
        queue_ = RequestQueue(lambda: script, 10)
        call = await submitted(queue_)
        queue_.give_up()
        assert script.aborted.get(timeout=0) == 0
        with pytest.raises(ShuttingDown):
            await call.next()
        await queue_.close()

    asyncio.run(give_up())


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
