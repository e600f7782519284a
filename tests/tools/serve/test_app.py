"""A real server with a tiny model: what its paths answer, in OpenAI's forms, with the trainer's numbers."""

from __future__ import annotations

import json
import logging
import logging.handlers
import math
import queue
import socket
import threading
from types import SimpleNamespace

import pytest
import torch
from helpers.serving import ASK, HANG_S, SERVED, completion, in_thread, load_served, save_served_model, serving
from helpers.tiny import tiny_model

from lockstep.config.sampling import SamplingParams
from lockstep.tools.serve.answers import Answers
from lockstep.tools.serve.text import PromptReader
from lockstep.workers.rollout.request import Request, Tokens, failed

PROMPTS = [[5, 6, 7], [9, 8], [12, 13, 14, 15, 16], [20]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_served_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def offline(folder):
    """Prompt -> greedy ids and log-probs, generated in a batch of its own."""
    engine = load_served(folder).engine

    def generate(prompts, max_tokens=8, stop_token_ids=(256,), **params):
        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, stop_token_ids=stop_token_ids, seed=0, **params)
        return engine.generate([Request(torch.tensor(ids), (0, i, 0)) for i, ids in enumerate(prompts)], sampling)

    return SimpleNamespace(generate=generate)


@pytest.fixture(scope="module")
def client(folder):
    with serving(load_served(folder)) as found:
        yield found


@pytest.fixture(scope="module")
def tokenizer(client):
    return client.server.loaded.tokenizer


def test_greedy_answers_are_those_of_offline_generation(client, offline, tokenizer):
    answer = client.complete(prompt=PROMPTS, max_tokens=8, temperature=0, n=2)
    expected = offline.generate(PROMPTS)
    assert answer["object"] == "text_completion"
    assert [choice["index"] for choice in answer["choices"]] == list(range(8))
    for place, choice in enumerate(answer["choices"]):
        completion = expected[place // 2]
        assert choice["text"] == tokenizer.decode(completion.ids, skip_special_tokens=True)
        assert choice["finish_reason"] == completion.finish_reason
    read, written = sum(map(len, PROMPTS)), 2 * sum(len(completion.ids) for completion in expected)
    assert answer["usage"] == {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}


def test_text_and_its_tokens_are_the_same_prompt(client, tokenizer):
    ids = tokenizer.encode("abc")
    status, tokens = client.post("/tokenize", {"prompt": "abc"})
    assert (status, tokens["tokens"], tokens["count"]) == (200, ids, 3)
    assert client.post("/detokenize", {"tokens": ids}) == (200, {"prompt": "abc"})
    texts = [client.complete(prompt=prompt, max_tokens=6, temperature=0)["choices"][0]["text"] for prompt in ("abc", ids)]
    assert texts[0] == texts[1]


def plain_log_probs(ids):
    """[P, vocabulary]: what a plain forward pass gives at each token, in float64."""
    with torch.no_grad():
        logits = tiny_model(seed=2, **SERVED).double()(torch.tensor([ids])).logits[0]
    return torch.log_softmax(logits, -1)


def test_echo_gives_the_trainers_log_probs_of_the_prompt(client, tokenizer):
    prompts = [[5, 6, 7, 8, 9, 10, 11], [30, 2, 4], [17]]
    answer = client.complete(prompt=prompts, max_tokens=1, temperature=0, logprobs=2, echo=True, seed=1234)
    for prompt, choice in zip(prompts, answer["choices"], strict=True):
        found = choice["logprobs"]
        names = [client.server.vocabulary.name(token) for token in range(258)]
        drawn = names.index(found["tokens"][-1])
        expected = plain_log_probs([*prompt, drawn])
        assert found["tokens"] == [names[token] for token in [*prompt, drawn]]
        assert found["token_logprobs"][0] is None
        assert found["top_logprobs"][0] is None
        assert choice["text"].startswith(tokenizer.decode(prompt))
        for place, token in enumerate([*prompt[1:], drawn]):
            assert found["token_logprobs"][place + 1] == pytest.approx(expected[place, token].item(), abs=2e-5)
            best = expected[place].topk(2)
            listed = sorted(found["top_logprobs"][place + 1].values(), reverse=True)
            assert listed[:2] == pytest.approx(best.values.tolist(), abs=2e-5)
            # Who asks whether a token is the likeliest compares numbers.
            assert (found["token_logprobs"][place + 1] == listed[0]) == (token == best.indices[0].item())
        assert found["token_logprobs"][-1] == max(found["top_logprobs"][-1].values())


def test_without_tokens_to_generate_echo_scores_the_prompt_alone(client):
    with_one = client.complete(prompt=[5, 6, 7], max_tokens=1, temperature=0, logprobs=1, echo=True)["choices"][0]
    alone = client.complete(prompt=[5, 6, 7], max_tokens=0, temperature=0, logprobs=1, echo=True)["choices"][0]
    assert alone["logprobs"]["token_logprobs"] == with_one["logprobs"]["token_logprobs"][:-1]
    assert client.complete(prompt="abc", max_tokens=0, echo=True)["choices"][0]["text"] == "abc"


def test_offsets_are_places_in_the_text_whatever_its_tokens_are(client, tokenizer, monkeypatch):
    """Who scores a continuation takes the tokens that begin in it. Each byte is a token here."""
    text = "a\u00e9 \U0001f600b"
    asked = {"prompt": text, "max_tokens": 0, "logprobs": 0, "echo": True}
    assert client.complete(**asked)["choices"][0]["logprobs"]["text_offset"] == [0, 1, 1, 2, 3, 3, 3, 3, 4]
    encode = client.server.reader.encode
    monkeypatch.setattr(client.server.reader, "encode", lambda text, special: [257] * special + encode(text, special))
    found = client.complete(**asked)["choices"][0]["logprobs"]
    assert found["tokens"][0] == "<turn>", "a tokenizer that begins every text so"
    assert found["text_offset"] == [0, 0, 1, 1, 2, 3, 3, 3, 3, 4]
    ids = [257, *encode("ab", False)]
    assert client.complete(**asked | {"prompt": ids})["choices"][0]["logprobs"]["text_offset"] == [0, 6, 7]


def test_a_seed_gives_each_of_several_answers_its_own_tokens_and_the_same_again(client):
    body = {"prompt": ["ab", [5, 6]], "max_tokens": 12, "temperature": 1.5, "n": 8, "seed": 7, "ignore_eos": True, "logprobs": 5}
    first, second = (client.complete(**body)["choices"] for _ in range(2))
    assert [choice["logprobs"]["tokens"] for choice in first] == [choice["logprobs"]["tokens"] for choice in second]
    assert len({tuple(choice["logprobs"]["tokens"]) for choice in first}) == 16


def test_a_stream_is_the_whole_answer_in_pieces(client):
    body = {"prompt": PROMPTS, "max_tokens": 8, "temperature": 0, "logprobs": 1}
    whole = client.complete(**body)
    events = client.events("/v1/completions", **body, stream_options={"include_usage": True})
    assert {event["id"] for event in events} == {events[0]["id"]}
    assert events[-1]["choices"] == []
    assert events[-1]["usage"] == whole["usage"]
    for choice in whole["choices"]:
        pieces = [p for event in events for p in event["choices"] if p["index"] == choice["index"]]
        assert "".join(piece["text"] for piece in pieces) == choice["text"]
        assert [piece["finish_reason"] for piece in pieces if piece["finish_reason"]] == [choice["finish_reason"]]
        for part in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            streamed = [value for piece in pieces if piece["logprobs"] for value in piece["logprobs"][part]]
            assert streamed == choice["logprobs"][part]


def test_chat_goes_through_the_models_template(client, tokenizer):
    messages = [{"role": "user", "content": "abc"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    same = client.complete(prompt=text, max_tokens=8, temperature=0, add_special_tokens=False, logprobs=2)
    body = {"messages": messages, "max_tokens": 8, "temperature": 0, "logprobs": True, "top_logprobs": 2, "model": "tiny"}
    status, answer = client.post("/v1/chat/completions", body)
    assert status == 200
    assert answer["object"] == "chat.completion"
    choice, plain = answer["choices"][0], same["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": plain["text"]}
    assert answer["usage"] == same["usage"]
    content = choice["logprobs"]["content"]
    assert [entry["logprob"] for entry in content] == plain["logprobs"]["token_logprobs"]
    assert b"".join(bytes(entry["bytes"]) for entry in content).decode(errors="replace") == plain["text"]
    assert all(entry == {"top_logprobs": entry["top_logprobs"]} | entry["top_logprobs"][0] for entry in content)
    tool = {"type": "function", "function": {"name": "add", "parameters": {}}}
    for more, start in (({"tools": [tool]}, "[add]"), ({"tools": [tool], "tool_choice": "none"}, "")):
        found = client.post("/tokenize", {"messages": messages} | more)[1]["tokens"]
        assert tokenizer.decode(found) == start + text
    # As OpenAI's client sends a conversation back: arguments as text, fields that are null. The template sees what it sees in training.
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    called = [*messages, {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None}]
    found = client.post("/tokenize", {"messages": called, "add_generation_prompt": False})[1]["tokens"]
    assert tokenizer.decode(found).endswith('<add>{"a": 1}')
    call["function"]["arguments"] = "{"
    status, refusal = client.post("/v1/chat/completions", {"messages": called})
    assert (status, "arguments is not JSON" in refusal["error"]["message"]) == (400, True)
    status, refusal = client.post("/v1/chat/completions", {"messages": [{"role": "nobody", "content": ""}]})
    assert status == 400
    assert "nobody may not speak" in refusal["error"]["message"]
    events = client.events("/v1/chat/completions", **body)
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(event["choices"][0]["delta"].get("content", "") for event in events) == plain["text"]


def test_sampling_follows_the_seed(client):
    def texts(**body):
        return [choice["text"] for choice in client.complete(prompt="abc", max_tokens=12, n=4, ignore_eos=True, **body)["choices"]]

    assert texts(seed=7) == texts(seed=7)
    assert len(set(texts(seed=7))) == 4
    assert texts(seed=7) != texts(seed=-8)
    assert texts() != texts()


def test_log_probs_at_the_lowest_temperature_are_numbers(client):
    answer = client.complete(prompt="abc", max_tokens=3, temperature=1e-20, logprobs=5, seed=1, ignore_eos=True)
    likely = client.complete(prompt="abc", max_tokens=3, temperature=0, logprobs=0, ignore_eos=True)
    found = answer["choices"][0]["logprobs"]
    assert found["tokens"] == likely["choices"][0]["logprobs"]["tokens"]
    assert found["token_logprobs"] == [0.0, 0.0, 0.0]
    assert all(len(top) == 5 and min(top.values()) < -1e15 for top in found["top_logprobs"])


def test_a_value_that_is_wrong_is_not_sent_back_whole(client):
    long = "9" * 4000
    for body in (
        f'{{"prompt": "a", "max_tokens": {long}}}',
        f'{{"prompt": "a", "model": "{long}"}}',
        f'{{"prompt": "a", "{long}": 1}}',
        f'{{"prompt": [{long}]}}',
        f'{{"prompt": "a", "seed": "{long}"}}',
    ):
        response = client.open("POST", "/v1/completions", body.encode())
        assert response.status in (400, 404)
        assert len(response.read()) < 600


def test_stop_strings_end_the_text_before_them(client):
    body = {"prompt": "x", "max_tokens": 20, "temperature": 0, "ignore_eos": True}
    whole = client.complete(**body)["choices"][0]["text"]
    stop = whole[4:6]
    stopped = client.complete(**body, stop=[stop, "????"])["choices"][0]
    assert stopped["finish_reason"] == "stop"
    assert stopped["text"] == whole[: whole.index(stop)]
    events = client.events("/v1/completions", **body, stop=stop)
    assert "".join(event["choices"][0]["text"] for event in events) == stopped["text"]
    by_token = client.complete(**body, stop_token_ids=[9])  # the fourth token, and the fifth
    assert (by_token["choices"][0]["finish_reason"], by_token["usage"]["completion_tokens"]) == ("stop", 4)


def test_penalties_change_what_is_drawn(client):
    def tokens(**penalty):
        body = {"prompt": "x", "max_tokens": 20, "temperature": 0, "ignore_eos": True, "logprobs": 0}
        return client.complete(**body | penalty)["choices"][0]["logprobs"]["tokens"]

    assert len(set(tokens())) < 15
    for name, value in (("frequency_penalty", 2.0), ("presence_penalty", 2.0), ("repetition_penalty", 5.0)):
        assert len(set(tokens(**{name: value}))) > 17, name


def test_an_answer_ends_with_the_context(client):
    answer = client.complete(prompt=[5] * 252, max_tokens=100, temperature=0, ignore_eos=True)
    assert answer["usage"]["completion_tokens"] == 4
    assert answer["choices"][0]["finish_reason"] == "length"
    status, error = client.post("/v1/completions", {"prompt": [5] * 256})
    assert (status, error["error"]["code"]) == (400, "context_length_exceeded")


def test_what_is_wrong_is_said_in_openais_form(client):
    cases = [
        (client.post("/v1/completions", b"{"), 400, "invalid_json"),
        (client.post("/v1/completions", {"prompt": "a", "model": "gpt-9"}), 404, "model_not_found"),
        (client.post("/v1/completions", {"prompt": [258]}), 400, None),
        (client.post("/v1/completions", {"prompt": ""}), 400, None),
        (client.post("/v1/completions", {"prompt": "a", "n": 128, "wrong": 1}), 400, "unknown_parameter"),
        (client.post("/v1/completions", b"{}", Content_Type="text/plain"), 415, None),
        (client.post("/v1/completions", b"x" * (9 << 20)), 413, "body_too_large"),
        (client.get("/v1/completions"), 405, None),
        (client.get("/v1/nothing"), 404, None),
        (client.post("/tokenize", {}), 400, None),
        (client.post("/detokenize", {"tokens": [-1]}), 400, None),
        (client.get("/v1/models/other"), 404, "model_not_found"),
    ]  # fmt: skip
    for (status, body), expected, code in cases:
        assert status == expected, body
        assert set(body["error"]) == {"message", "type", "param", "code"}
        assert body["error"]["code"] == code


@pytest.mark.parametrize("stream", [False, True])
def test_a_bug_is_an_error_for_its_client_and_a_traceback_in_the_log(client, monkeypatch, capsys, stream):
    monkeypatch.setattr(Answers, "tokens" if stream else "choice", lambda *given: 1 // 0)
    logged = queue.Queue()
    monkeypatch.setattr(logging.getLogger("uvicorn.error"), "handlers", [logging.handlers.QueueHandler(logged)])
    response = client.open("POST", "/v1/completions", {"prompt": "a", "max_tokens": 2, "ignore_eos": True, "stream": stream})
    body = json.loads(response.read().decode().removeprefix("data: "))
    assert (response.status, body["error"]["code"]) == (200 if stream else 500, "internal")
    log = capsys.readouterr().err if stream else logged.get(timeout=HANG_S).getMessage()
    assert log.count("ZeroDivisionError: ") == 1
    assert client.get("/health")[0] == 200
    counted = client.get("/metrics")[1]
    assert ('path="/v1/completions",status="500"' in counted) or stream
    while client.gauge("requests_open"):
        pass


def test_the_server_describes_itself(client):
    status, body = client.get("/v1/models")
    assert status == 200
    assert [(card["id"], card["max_model_len"]) for card in body["data"]] == [("tiny", 256)]
    assert client.get("/v1/models/tiny")[1] == body["data"][0]
    assert client.get("/health") == (200, {"status": "ok"})
    assert client.get("/tokenizer_info")[1]["eos_token"] == client.server.loaded.tokenizer.eos_token
    assert client.gauge("engine_up") == 1
    assert client.gauge("requests_open") == 0
    assert client.gauge("generated_tokens_total") > 0
    assert math.isfinite(client.gauge("request_seconds_sum"))


def test_another_engine_answers_too_and_says_what_it_cannot(folder, offline, tokenizer):
    with serving(load_served(folder, name="hf")) as client:
        answer = client.complete(prompt=PROMPTS, max_tokens=8, temperature=0)
        expected = [tokenizer.decode(completion.ids, skip_special_tokens=True) for completion in offline.generate(PROMPTS)]
        assert [choice["text"] for choice in answer["choices"]] == expected
        status, scored = client.post("/v1/completions", {"prompt": [5, 6, 7], "max_tokens": 1, "logprobs": 1, "echo": True})
        if status == 200:  # never fewer than it was asked for
            assert len(scored["choices"][0]["logprobs"]["token_logprobs"]) == 4
        else:
            assert "log-probs of prompts" in scored["error"]["message"]


# -- with a scripted engine -------------------------------------------------------------------------------------------------------


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
