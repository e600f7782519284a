"""Clients that misbehave below HTTP, or use parts of it that few do. The model is real and tiny."""

from __future__ import annotations

import json
import socket

import pytest
from helpers.serving import HANG_S, load_served, save_served_model, serving

from lockstep.tools.serve import limits

ASK = {"prompt": [5, 6, 7], "max_tokens": 6, "temperature": 0}


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    with serving(load_served(save_served_model(tmp_path_factory.mktemp("model")))) as found:
        yield found


@pytest.fixture(scope="module")
def expected(client):
    return client.complete(**ASK)["choices"][0]["text"]


def head(body: bytes, *lines: str, version: str = "1.1") -> bytes:
    given = [f"POST /v1/completions HTTP/{version}", "Content-Type: application/json", *lines]
    return "\r\n".join([*given, "", ""]).encode() + body


def whole(*lines: str, version: str = "1.1", **more: object) -> bytes:
    body = json.dumps(ASK | more).encode()
    return head(body, "Host: localhost", f"Content-Length: {len(body)}", *lines, version=version)


def exchange(client, *pieces: bytes, half_close: bool = False) -> bytes:
    """All that comes back until the server closes."""
    with socket.create_connection(("127.0.0.1", client.port), HANG_S) as connection:
        for piece in pieces:
            connection.sendall(piece)
        if half_close:
            connection.shutdown(socket.SHUT_WR)
        return rest(connection)


def rest(connection: socket.socket) -> bytes:
    found = b""
    try:
        while piece := connection.recv(65536):
            found += piece
    except ConnectionResetError:  # it was closed with something unread
        pass
    return found


def texts(answer: bytes) -> list[str]:
    """The answers in a string of responses."""
    decoder, found, text = json.JSONDecoder(), [], answer.decode()
    while (start := text.find('{"id"')) >= 0:
        body, end = decoder.raw_decode(text[start:])
        found.append(body["choices"][0]["text"])
        text = text[start + end :]
    return found


@pytest.mark.parametrize("sent", [b"", b"POST /v1/comp", b"GET /health HTTP/1.1\r\nHost: "])
def test_a_head_that_does_not_come_to_its_end_closes_the_connection(client, monkeypatch, sent):
    monkeypatch.setattr(limits, "HEAD_S", 0.05)
    assert exchange(client, sent) == limits._HEAD_TOO_LATE


def test_so_does_the_head_of_a_second_request(client, monkeypatch):
    with socket.create_connection(("127.0.0.1", client.port), HANG_S) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        found = b""
        while not found.endswith(b'{"status":"ok"}'):
            found += connection.recv(65536)
        monkeypatch.setattr(limits, "HEAD_S", 0.05)
        connection.sendall(b"GET /v1/mod")
        assert rest(connection) == limits._HEAD_TOO_LATE


def test_a_request_may_take_longer_than_its_head(client, monkeypatch, expected):
    monkeypatch.setattr(limits, "HEAD_S", 0.05)
    with socket.create_connection(("127.0.0.1", client.port), HANG_S) as slow:
        slow.sendall(head(b"{", "Host: localhost", "Content-Length: 90", "Connection: close"))
        assert exchange(client, b"").endswith(limits._HEAD_TOO_LATE), "so much time has passed"
        slow.sendall(json.dumps(ASK).encode()[1:].ljust(89))
        assert texts(rest(slow)) == [expected]


def test_requests_one_behind_the_other_are_answered_in_order(client, expected):
    short = client.complete(**ASK | {"max_tokens": 2})["choices"][0]["text"]
    assert texts(exchange(client, whole() + whole(max_tokens=2) + whole("Connection: close"))) == [expected, short, expected]


def test_an_old_client_is_answered_and_its_stream_ends_with_the_connection(client, expected):
    assert texts(exchange(client, whole(version="1.0"))) == [expected]
    events = exchange(client, whole(version="1.0", stream=True)).partition(b"\r\n\r\n")[2]
    assert events.endswith(b"data: [DONE]\n\n")
    assert "".join(texts(events)) == expected


def test_a_body_in_chunks_of_any_size_is_one_body(client, expected):
    data = json.dumps(ASK).encode()
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in (data[:1], data[1:4], data[4:])) + b"0\r\n\r\n"
    start = ("Host: localhost", "Transfer-Encoding: chunked", "Connection: close")
    assert texts(exchange(client, head(b"", *start), *(chunks[i : i + 1] for i in range(len(chunks))))) == [expected]
    assert exchange(client, head(b"zz\r\n", *start)).startswith(b"HTTP/1.1 400")


@pytest.mark.parametrize(
    "sent",
    [
        whole("X: " + "a" * 700_000),
        b"GET /" + b"a" * 700_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
        head(b"{}", "Content-Length: 2"),
        whole("Content-Length: 3"),
        head(b"{}", "Host: localhost", "Content-Length: -1"),
    ],
    ids=["long header", "long path", "TLS", "no host", "two lengths", "negative length"],
)
def test_what_is_no_http_is_refused_and_ends_nothing_else(client, sent, expected):
    assert exchange(client, sent).startswith(b"HTTP/1.1 400")
    assert client.complete(**ASK)["choices"][0]["text"] == expected


def test_who_closes_its_side_has_gone(client):
    """As with every server of this kind: whether the other side is still read cannot be told."""
    asked = whole(max_tokens=190, ignore_eos=True, stream=True)
    assert b"[DONE]" not in exchange(client, asked, half_close=True)
    while client.gauge("requests_open"):
        pass


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "application/jsonp", ""])
def test_another_content_type_is_refused(client, kind):
    status, body = client.post("/v1/completions", ASK, Content_Type=kind)
    assert (status, body["error"]["type"]) == (415, "invalid_request_error")


def test_the_length_may_be_longer_than_what_is_sent_and_the_method_another(client):
    assert exchange(client, head(b"{", "Host: localhost", "Content-Length: 9"), half_close=True) == b""
    assert client.get("/v1/completions")[0] == 405
    assert client.open("HEAD", "/health").status == 200
    assert client.post("/health", {})[0] == 405


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
        for path in ("/v1/models", "/metrics", "/tokenizer_info", "/openapi.json", "/other", "/health/", "/healthy"):
            right = "Bearer s\u00e9cret".encode().decode("latin-1")
            wrong = ("", "Bearer secret", "s\u00e9cret", "Bearer ", f"{right}x", right[:-1], right.upper())
            for headers in ({}, *({"Authorization": value} for value in wrong)):
                status, body = client.get(path, **headers)
                assert (status, body["error"]["code"]) == (401, "invalid_api_key"), (path, headers)
        assert client.get("/v1/models", Authorization=right)[0] == 200
