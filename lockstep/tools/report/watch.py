"""`lockstep watch RUN [RUN2 ...]`: the report of runs while they train, served on this machine."""

import argparse
import json
import sys
import threading
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from lockstep.errors import DataError, LockstepError
from lockstep.tools.report.collector import Collector
from lockstep.tools.report.html import Block, assemble
from lockstep.utils.terminal import say

_HOSTS = ("127.0.0.1", "localhost", "[::1]")


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until Ctrl-C; return the exit status."""
    parser = argparse.ArgumentParser("lockstep watch", description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="the folder of a run, such as checkpoints/lockstep/ppo")
    parser.add_argument("--port", type=int, default=8017, help="on localhost; 0 takes a free one (default: %(default)s)")
    options = parser.parse_args(sys.argv[1:] if arguments is None else arguments)
    try:
        server = make_server(options.runs, options.port)
    except LockstepError as error:
        say(f"error: {error}", is_error=True)
        return 1
    except (OSError, OverflowError) as error:
        print(f"error: port {options.port} cannot be taken: {error}; choose another with --port", file=sys.stderr)
        return 1
    print(f"http://localhost:{server.server_address[1]}/  (Ctrl-C ends it; the run does not notice)", flush=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        print()
    finally:
        server.server_close()
    return 0


def make_server(runs: Sequence[Path], port: int = 0) -> ThreadingHTTPServer:
    """Return a server of the live page on 127.0.0.1, not yet running.

    Raises DataError if a folder does not exist, OSError if the port cannot be taken.
    """
    for run in runs:
        if not run.is_dir():
            raise DataError(f"{run} is not a folder; give the folder of a run, which it names at its start")
    live = LiveRuns(runs)

    class Handler(_Handler):
        source = live

    return ThreadingHTTPServer(("127.0.0.1", port), Handler)


class LiveRuns:
    """The blocks of runs that grow. Several threads may use it."""

    def __init__(self, runs: Sequence[Path]) -> None:
        self._runs = list(runs)
        self._lock = threading.Lock()
        self._collector: Collector | None = None
        self._blocks: list[Block] = []
        self._epoch = 0

    def update(self) -> tuple[int, list[Block]]:
        """Read what is new. Return how often the blocks were started anew, since a run went back to an earlier step, and all blocks.

        Raises DataError while a run has written nothing.
        """
        with self._lock:
            if self._collector is None:
                self._collector = Collector(self._runs)
            elif self._collector.was_rewritten():
                self._collector = Collector(self._runs)
                self._blocks = []
                self._epoch += 1
            self._blocks += self._collector.collect()
            return self._epoch, list(self._blocks)


class _Handler(BaseHTTPRequestHandler):
    """`/` is the page without data, `/blocks?since=N&epoch=E` what came after the first N blocks."""

    source: LiveRuns

    def do_GET(self) -> None:
        # A page of another site cannot be made to read this one by a name that leads here.
        if self.headers.get("Host", "").rsplit(":", 1)[0] not in _HOSTS:
            return self._answer(403, "text/plain", b"this server answers to localhost only\n")
        address = urlsplit(self.path)
        if address.path == "/":
            return self._answer(200, "text/html; charset=utf-8", "".join(assemble([], live=True)).encode())
        if address.path != "/blocks":
            return self._answer(404, "text/plain", b"there is / and /blocks?since=N\n")
        try:
            query = {name: int(values[0]) for name, values in parse_qs(address.query).items()}
        except ValueError:
            return self._answer(400, "text/plain", b"since and epoch are numbers\n")
        try:
            epoch, blocks = self.source.update()
        except (DataError, OSError) as error:  # no step yet, or a folder that is being moved
            return self._answer(503, "text/plain", f"{error}\n".encode())
        is_current = query.get("epoch", epoch) == epoch
        first = max(0, query.get("since", 0)) if is_current else 0
        data = [{"kind": block.kind, "first": block.first, "data": block.base64} for block in blocks[first:]]
        return self._answer(200, "application/json", json.dumps({"epoch": epoch, "blocks": data}).encode())

    def _answer(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Requests are not worth a line each."""
