import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from lockstep.errors import ConfigError, ResourceError
from lockstep.tools.evaluate.answerers import AnswerSampling, ServerModel
from lockstep.tools.evaluate.questions import Question


class Answers(BaseHTTPRequestHandler):
    """Says what it was asked. A prompt "busy" is refused once, "bad" always; to "torn" half an answer comes, to "nothing" none."""

    def do_GET(self):
        self._send(200, {"data": [{"id": name} for name in self.server.models]})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.bodies.append((self.path, body, self.headers.get("Authorization")))
        asked = body.get("prompt") or body["messages"][-1]["content"]
        if asked == "bad" or (asked == "busy" and len(self.server.bodies) == 1):
            return self._send(400 if asked == "bad" else 503, {"error": "no"})
        if asked in ("torn", "nothing"):
            return self.wfile.write(b'HTTP/1.0 200 OK\r\nContent-Length: 100\r\n\r\n{"choices": [' if asked == "torn" else b"")
        if body.get("echo"):
            # One token per character; the generated one comes last.
            numbers = [None, *(-float(ord(c)) for c in asked[1:]), -1000.0]
            return self._send(
                200, {"choices": [{"logprobs": {"text_offset": list(range(len(asked) + 1)), "token_logprobs": numbers}}]}
            )
        choice = {"finish_reason": "length"}
        choice |= {"message": {"content": f"{asked}!STOP more"}} if "chat" in self.path else {"text": f"{asked}?"}
        return self._send(200, {"choices": [choice], "usage": {"completion_tokens": 3}})

    def _send(self, status, body):
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args):
        pass


@pytest.fixture
def http_server(monkeypatch):
    monkeypatch.setattr("lockstep.tools.evaluate.answerers.time.sleep", lambda seconds: None)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    server.models, server.bodies = ["m"], []
    server.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


def question(prompt, is_plain=False, choices=()):
    return Question("s", "text", prompt, is_plain, {}, choices=choices)


def ask(server, questions, **drawing):
    samples = ServerModel(server.url, None, 4, 60.0).answer(questions, AnswerSampling(**drawing))
    return sorted(samples, key=lambda sample: (sample.question, sample.number))


def test_conversations_and_texts_go_to_their_endpoints_with_the_sampling(http_server, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    questions = [question([{"role": "user", "content": "hi"}]), question("plain", is_plain=True), question("as a user")]
    samples = ask(http_server, questions, n=2, temperature=0.5, top_k=7, stop=("STOP",), max_tokens=9, seed=3)
    assert [sample.text for sample in samples] == ["hi!", "hi!", "plain?", "plain?", "as a user!", "as a user!"]
    assert {(sample.finish_reason, sample.num_tokens, sample.failure) for sample in samples} == {("length", 3, None)}
    assert {path for path, _, _ in http_server.bodies} == {"/v1/chat/completions", "/v1/completions"}
    for _, body, key in http_server.bodies:
        assert (body["model"], body["temperature"], body["top_k"], body["stop"], body["max_tokens"]) == ("m", 0.5, 7, ["STOP"], 9)
        assert "min_p" not in body
        assert key == "Bearer secret"
    assert len({body["seed"] for _, body, _ in http_server.bodies}) == 6


def test_a_busy_server_is_asked_again_and_a_refusal_is_a_failure_of_one_sample(http_server):
    (sample,) = ask(http_server, [question("busy", is_plain=True)])
    assert sample.text == "busy?"
    bad, good = ask(http_server, [question("bad", is_plain=True), question("good", is_plain=True)])
    assert (bad.finish_reason, good.text) == ("error", "good?")
    assert "status 400" in bad.failure


def test_an_answer_that_breaks_off_is_a_failure_of_one_sample(http_server):
    torn, nothing, good = ask(http_server, [question(prompt, is_plain=True) for prompt in ("torn", "nothing", "good")])
    assert (torn.finish_reason, nothing.finish_reason, good.text) == ("error", "error", "good?")
    assert "IncompleteRead" in torn.failure
    with pytest.raises(ResourceError, match="gave no likelihood"):
        ServerModel(http_server.url, None, 1, 60.0).log_likelihoods([question("to", True, ("rn",))])


def test_the_likelihood_of_a_choice_is_that_of_the_tokens_that_begin_in_it(http_server):
    found = ServerModel(http_server.url + "/v1", "m", 2, 60.0).log_likelihoods(
        [question("ab", True, (" c", " dd")), question("x", True, ("y",))]
    )
    assert found == [[-float(ord(" ") + ord("c")), -float(ord(" ") + 2 * ord("d"))], [-float(ord("y"))]]


def test_what_is_no_server_or_has_no_such_model_is_an_error_before_anything_is_asked(http_server):
    with pytest.raises(ResourceError, match="does not answer /v1/models"):
        ServerModel("http://127.0.0.1:9", None, 1, 60.0)
    with pytest.raises(ConfigError, match="--served-model other: .* has m"):
        ServerModel(http_server.url, "other", 1, 60.0)
    http_server.models = ["a", "b"]
    with pytest.raises(ConfigError, match="has the models a, b; choose one"):
        ServerModel(http_server.url, None, 1, 60.0)
