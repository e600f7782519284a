"""Against a real HTTP server on loopback that speaks SandboxFusion's interface and really runs the programs."""

from __future__ import annotations

import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from lockstep.errors import ConfigError, ResourceError
from lockstep.judging.code import compute_score
from lockstep.judging.sandbox import ProgramLimits, make_sandbox
from lockstep.judging.sandbox.fusion import FusionSandbox


class Server(ThreadingHTTPServer):
    """`faults` are used up first: one function (handler) -> None for each request that is to go wrong."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, local):
        super().__init__(("127.0.0.1", 0), Handler)
        self.local, self.faults, self.requests = local, [], []

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append((self.path, asked))
        if self.server.faults:
            self.server.faults.pop(0)(self)
        else:
            self.answer(run_code(self.server.local, asked))

    def answer(self, body, status=200):
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def log_message(self, *_):
        pass


def run_code(local, asked):
    """What the real server does, with the local sandbox in place of its own."""
    result = local.run(asked["code"], asked["stdin"], asked["run_timeout"])
    is_late = result.status == "timeout"
    run_result = {
        "status": "TimeLimitExceeded" if is_late else "Finished",
        "return_code": None if is_late else result.exit_code if result.exit_code is not None else -9,
        "stdout": result.stdout,
        "stderr": result.stderr,
        "execution_time": result.seconds,
    }
    status = "Success" if result.status == "ok" else "Failed"
    return {
        "status": status,
        "message": "",
        "compile_result": None,
        "run_result": run_result,
        "executor_pod_name": None,
        "files": {},
    }


@pytest.fixture
def server(sandbox):
    made = Server(sandbox)
    thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    yield made
    made.shutdown()
    made.server_close()
    thread.join(timeout=10)


def client(server, **options):
    return FusionSandbox(
        server.url,
        limits=ProgramLimits(wall_s=2.0, memory_mb=200, output_bytes=1000),
        **{"backoff_s": 0.01, "answer_s": 5.0} | options,
    )


def test_programs_run_and_their_results_come_back(server):
    remote = client(server)
    ok = remote.run("print(input() + '!')", "hello")
    assert (ok.status, ok.exit_code, ok.stdout, ok.stderr) == ("ok", 0, "hello!\n", "")
    assert ok.seconds > 0
    assert remote.run("raise SystemExit(3)").exit_code == 3
    late = remote.run("while True: pass", wall_s=0.2)
    assert (late.status, late.exit_code) == ("timeout", None)
    assert remote.run("import ctypes; ctypes.string_at(0)").status == "killed"
    assert remote.run("raise MemoryError").status == "memory"
    assert remote.run("print('x' * 5000)").stdout == "x" * 1000 + "\n[cut: output limit]"


def test_nothing_is_kept_of_a_connection_that_the_server_has_closed(server):
    remote = client(server)
    assert Handler.protocol_version == "HTTP/1.0"  # it hangs up after each answer
    assert remote.run("print(1)").stdout == "1\n"
    assert not remote._connections


def test_the_request_is_what_the_server_expects(server):
    client(server).run("print(1)", "in", wall_s=1.5)
    assert server.requests == [
        (
            "/run_code",
            {
                "code": "print(1)",
                "language": "python",
                "stdin": "in",
                "run_timeout": 1.5,
                "compile_timeout": 1.5,
                "memory_limit_MB": 200,
            },
        )
    ]
    FusionSandbox(server.url + "/run_code/").run("")
    FusionSandbox(server.url + "/prefix").run("")
    assert [path for path, _ in server.requests[1:]] == ["/run_code", "/prefix/run_code"]


def test_code_rewards_work_through_the_server(server):
    remote = client(server)
    assert compute_score("def f(x): return x + 1", {"test_list": ["assert f(1) == 2"]}, sandbox=remote)["score"] == 1.0
    assert compute_score("def f(x): return x", {"test_list": ["assert f(1) == 2"]}, sandbox=remote)["score"] == 0.0
    assert compute_score("print(int(input()) * 2)", {"inputs": ["2", "3"], "outputs": ["4", "6"]}, sandbox=remote)["score"] == 1.0


def broken_json(handler):
    handler.answer(b"{not json")


def wrong_shape(handler):
    handler.answer({"status": "Success", "run_result": {"status": "Finished", "return_code": "0"}})


def sandbox_error(handler):
    handler.answer({"status": "SandboxError", "message": "no pods", "compile_result": None, "run_result": None})


def hang_up(handler):
    handler.connection.shutdown(socket.SHUT_RDWR)


def status(code):
    return lambda handler: handler.answer(b"wait", code)


@pytest.mark.parametrize("fault", [status(500), status(503), status(429), broken_json, wrong_shape, sandbox_error, hang_up])
def test_a_passing_fault_is_tried_again_and_a_lasting_one_is_an_exception(server, fault):
    remote = client(server, num_attempts=3)
    server.faults += [fault, fault]
    assert remote.run("print(1)").stdout == "1\n"
    server.faults += [fault] * 3
    with pytest.raises(ResourceError, match="in 3 attempts"):
        remote.run("print(1)")
    assert len(server.requests) == 6


def test_a_refusal_is_not_repeated(server):
    server.faults.append(status(422))
    with pytest.raises(ResourceError, match="HTTP 422"):
        client(server).run("print(1)")
    assert len(server.requests) == 1


def test_the_pauses_grow(server):
    server.faults += [status(500)] * 3
    began = time.monotonic()
    client(server, backoff_s=0.1).run("print(1)")
    assert 0.75 * 0.7 <= time.monotonic() - began < 5


@pytest.mark.parametrize("drip", [b"", b" "])
def test_a_server_that_is_silent_or_sends_a_byte_at_a_time_runs_into_the_deadline(server, drip):
    def slow(handler):
        handler.send_response(200)
        handler.send_header("Content-Length", "1000")
        handler.end_headers()
        for _ in range(100):
            try:
                handler.wfile.write(drip)
            except OSError:
                return
            time.sleep(0.05)

    server.faults.append(slow)
    began = time.monotonic()
    with pytest.raises(ResourceError, match="1 attempts"):
        client(server, num_attempts=1, answer_s=0.3).run("print(1)", wall_s=0.1)
    assert time.monotonic() - began < 3


def test_a_dead_server_is_an_exception():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    dead = FusionSandbox(f"http://127.0.0.1:{port}", num_attempts=2, backoff_s=0.01)
    with pytest.raises(ResourceError, match="ConnectionRefusedError"):
        dead.run("print(1)")


def test_closing_ends_open_requests(server):
    release = threading.Event()
    server.faults += [lambda handler: release.wait(20)] * 2
    remote = client(server)
    with ThreadPoolExecutor(2) as threads:
        calls = [threads.submit(remote.run, "print(1)") for _ in range(2)]
        while len(server.requests) < 2:
            time.sleep(0.01)
        began = time.monotonic()
        remote.close()
        assert time.monotonic() - began < 5
        release.set()
        for call in calls:
            with pytest.raises(ResourceError, match="closed"):
                call.result()


@pytest.mark.parametrize("url", ["", "localhost:8080", "ftp://host", "http://"])
def test_an_address_that_cannot_work_names_its_key(url):
    with pytest.raises(ConfigError, match=r"reward\.sandbox\.url"):
        FusionSandbox(url)


def test_make_sandbox_checks_the_server(server):
    assert isinstance(make_sandbox(url=server.url), FusionSandbox)
    server.faults += [status(400)]
    with pytest.raises(ResourceError, match="HTTP 400"):
        make_sandbox(url=server.url)
