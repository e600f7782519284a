"""`lockstep serve MODEL`: OpenAI's HTTP interface over one model, computed as the trainer computes it. docs/serve.md."""

from __future__ import annotations

import argparse
import importlib.util
import os
import signal
import socket
import sys
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from lockstep.errors import ConfigError, MissingExtra, ResourceError, as_command
from lockstep.observability.waiting import shown_work
from lockstep.tools.load_model import add_model_arguments, find_model, load_model_of, names_options
from lockstep.utils.garbage import frozen_objects

if TYPE_CHECKING:
    import uvicorn

    from lockstep.tools.serve.app import Server

_LOCAL = ("127.0.0.1", "localhost", "::1")
_KEY = "LOCKSTEP_API_KEY"
GRACE_S = 10.0
"""After a signal, how long requests that run may take to finish."""
_SEND_ERRORS_S = 5
"""And after that, how long the errors of the others may take to be sent."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="lockstep serve", description=__doc__)
    add_model_arguments(parser)
    parser.add_argument("--host", default="127.0.0.1", help="the address to listen on (default: 127.0.0.1, this machine alone)")
    parser.add_argument("--port", type=int, default=8000, help="0 chooses a free one (default: 8000)")
    parser.add_argument(
        "--served-model-name", "--name", dest="name", metavar="NAME", help="the model's name for clients (default: MODEL as given)"
    )
    parser.add_argument(
        "--allowed-hosts", nargs="+", default=[], metavar="NAME",
        help="names in the Host header that are answered without a key, beside addresses, localhost and this machine's name; '*': any",
    )  # fmt: skip
    parser.add_argument("--api-key", metavar="KEY", help=f"what clients must send; better as {_KEY}, which other users cannot see")
    parser.add_argument("--max-queue", type=int, default=1024, metavar="N", help="requests that may wait (default: 1024)")
    parser.add_argument("--timeout-s", type=float, default=600.0, metavar="S", help="longest time of a request (default: 600)")
    parser.add_argument("--max-body-bytes", type=int, default=8 << 20, metavar="N", help="longest body (default: 8 MiB)")
    parser.add_argument(
        "--num-tokens", type=int, metavar="N", help="tokens that the key-value cache holds (default: what memory allows)"
    )
    parser.add_argument(
        "--follow", action="store_true", help="MODEL is a run's folder: change to each newer checkpoint, between requests"
    )
    return parser


@as_command
@names_options
def main(arguments: Sequence[str]) -> int:
    """Serve until a signal ends it."""
    options = _parser().parse_args(arguments)
    for package in ("fastapi", "uvicorn"):
        if importlib.util.find_spec(package) is None:
            raise MissingExtra("lockstep serve", package, "serve")
    for name, least in (("max_queue", 0), ("timeout_s", 0.001), ("max_body_bytes", 1), ("max_num_seqs", 1)):
        if getattr(options, name) < least:
            raise ConfigError(f"--{name.replace('_', '-')}={getattr(options, name)}; it must be at least {least}")
    # The HTTP server waits for requests that run and raises the signal again; then everything is ended as after an error.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    api_key = options.api_key or os.environ.get(_KEY) or None
    with listening_socket(options.host, options.port, options.timeout_s) as bound:  # a port that is taken is said before loading
        with shown_work("starting the server"):
            from lockstep.tools.serve.app import Server, ServerOptions
            from lockstep.tools.serve.limits import RequestLimits
            from lockstep.tools.serve.queue import newer_weights

        if options.follow and (options.engine != "native" or find_model(options.model).step is None):
            raise ConfigError("--follow needs a run's folder as MODEL, and --engine native")
        loaded = load_model_of(options)
        limits = RequestLimits(
            api_key=api_key,
            allowed_hosts=[options.host, *options.allowed_hosts],
            timeout_s=options.timeout_s,
            max_body_bytes=options.max_body_bytes,
        )
        own = ServerOptions(
            name=options.name or options.model,
            limits=limits,
            max_queue=options.max_queue,
            num_tokens=options.num_tokens,
            newer=partial(newer_weights, options.model) if options.follow else None,
        )
        server = Server(loaded, own)
        if options.host not in _LOCAL and api_key is None:
            print(f"warning: every client that reaches {options.host} can use this server: there is no --api-key", flush=True)
        try:
            listen(bound)  # another server may have bound the same port while neither listened
            with frozen_objects():  # no request waits while Python walks over all that was imported
                http_server(server, f"{own.name} on {address_of(bound)}").run(sockets=[bound])
        finally:
            loaded.engine.close()
    return 0


def listening_socket(host: str, port: int, timeout_s: float) -> socket.socket:
    """A socket bound to an address; clients cannot connect before the server listens. Raises ResourceError if it cannot be bound.

    A client that neither reads nor closes is cut off by the system after `timeout_s`.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # of Linux; connections inherit it
            bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(min(timeout_s, 86400.0) * 1000))
        bound.bind((host, port))
    except (OSError, OverflowError) as error:
        bound.close()
        raise _cannot_listen(f"{host}:{port}", error) from error
    return bound


def listen(bound: socket.socket) -> None:
    """From here on clients can connect. Raises ResourceError if another socket listens on the same address since this one was bound."""
    try:
        bound.listen()
    except OSError as error:
        raise _cannot_listen("{}:{}".format(*bound.getsockname()[:2]), error) from error


def _cannot_listen(address: str, error: Exception) -> ResourceError:
    return ResourceError(f"cannot listen on {address}: {error}; choose another --port or --host")


def address_of(bound: socket.socket) -> str:
    """Where clients find it."""
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def http_server(server: Server, title: str) -> uvicorn.Server:
    """What serves `server` on sockets until a signal, or until its should_exit is set. Requests that run then have GRACE_S to finish; the
    others are answered with an error."""
    import asyncio

    import uvicorn

    from lockstep.tools.serve.limits import TimedProtocol

    class AnnouncedServer(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            print(f"serving {title}", flush=True)

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            last_call = asyncio.get_running_loop().call_later(GRACE_S, server.give_up)
            await super().shutdown(sockets)
            last_call.cancel()

    config = uvicorn.Config(
        server.app,
        http=TimedProtocol,
        ws="none",
        lifespan="on",
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=int(GRACE_S) + _SEND_ERRORS_S,
    )
    return AnnouncedServer(config)
