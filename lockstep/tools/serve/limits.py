"""What every request must keep to before a route sees it: the Host header, the API key, size and type of the body, and time.

`Limits` is an ASGI middleware. `TimedProtocol` limits the time of a request's head, which no ASGI application sees.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import socket
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

import h11
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse
from uvicorn.protocols.http.h11_impl import H11Protocol

from lockstep.tools.serve.metrics import Metrics
from lockstep.tools.serve.schema import BadRequest, ServeError, TooLate, WrongKey, shortened

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEAD_S = 30.0
"""How long the head of a request may take. After it the request has a deadline of its own; before it, nothing else ends the connection, and
each has a file handle."""
OPEN_PATHS = ("/health",)
"""What needs no key: a load balancer asks it."""
CLIENT_GONE = 499
"""The status that is counted where the client did not wait for one."""
_SEND_S = 30.0
"""After a request's deadline, how long a client may take to read the answer."""
_READ_ON = 64
"""How many times the longest body is read, and thrown away, before the connection is cut: a client that still sends does not see the
answer."""
_HEAD_TOO_LATE = b"HTTP/1.1 408 Request Timeout\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"


@dataclass(frozen=True, kw_only=True)
class RequestLimits:
    """What `Limits` allows."""

    api_key: str | None = None
    allowed_hosts: Collection[str] = ()
    """Names by which clients may call the server, beside addresses and those of this machine; "*": any."""
    timeout_s: float = 600.0
    """Longest time of a request."""
    max_body_bytes: int = 8 << 20


class Limits:
    """Refuses what is over the limits, and counts all answers. Routes find the request's deadline in `request.state.deadline`, as the time
    of the event loop."""

    def __init__(self, app: ASGIApp, limits: RequestLimits, metrics: Metrics, paths: Collection[str]) -> None:
        self._app = app
        self._limits = limits
        self._metrics = metrics
        self._paths = frozenset(paths)
        self._hosts = {"localhost", socket.gethostname().lower(), *(name.lower() for name in limits.allowed_hosts)}
        self._expected = None if limits.api_key is None else f"Bearer {limits.api_key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = CLIENT_GONE

        async def counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        deadline = asyncio.get_running_loop().time() + self._limits.timeout_s
        try:
            async with asyncio.timeout_at(deadline + _SEND_S):
                await self._answer(scope, receive, counted, deadline)
        except (ClientDisconnect, TimeoutError):  # the client does not read any more
            pass
        except Exception:
            status = 500
            raise
        finally:
            path = scope["path"] if scope["path"] in self._paths else "other"  # a name for each guess would fill the memory
            self._metrics.responses[path, status] += 1

    async def _answer(self, scope: Scope, receive: Receive, send: Send, deadline: float) -> None:
        try:
            self._check_host(scope)
            self._check_key(scope)
            if scope["method"] == "POST":
                async with asyncio.timeout_at(deadline):
                    receive = await self._read_body(scope, receive)
        except TimeoutError:
            await error_response(too_late(self._limits.timeout_s))(scope, receive, send)
            return
        except ServeError as error:
            await error_response(error)(scope, receive, send)
            return
        state = scope.get("state", {}) | {"deadline": deadline}
        method = "GET" if scope["method"] == "HEAD" else scope["method"]  # the HTTP server leaves out the body
        await self._app({**scope, "state": state, "method": method}, receive, send)

    def _check_host(self, scope: Scope) -> None:
        """Raise BadRequest for a name that is not known to be this machine's.

        A web page of another name that is made to lead here could otherwise read answers in the browser of a user of this machine. An
        address is not such a name, and the page does not know a key.
        """
        if self._expected is not None or "*" in self._hosts:
            return
        given = _header(scope, b"host", b"localhost").decode("latin-1").lower()
        before, _, port = given.rpartition(":")
        name = before if port.isdecimal() else given
        if name not in self._hosts and not _is_address(name):
            raise BadRequest(
                f"the Host header names {shortened(name)}, which this server does not answer for; start it with --allowed-hosts NAME, or "
                "use its address",
                status=403,
                code="host_not_allowed",
            )

    def _check_key(self, scope: Scope) -> None:
        if self._expected is None or scope["path"] in OPEN_PATHS:
            return
        if not hmac.compare_digest(_header(scope, b"authorization"), self._expected):
            raise WrongKey

    async def _read_body(self, scope: Scope, receive: Receive) -> Receive:
        """Read the whole body; returns what gives it to the route. Raises BadRequest for one that is too large or no JSON.

        A page of another site cannot send application/json without asking first (CORS), and this server never agrees.
        """
        if _header(scope, b"content-type").partition(b";")[0].strip().lower() != b"application/json":
            raise BadRequest("expected Content-Type: application/json", status=415)
        limit = self._limits.max_body_bytes
        body = bytearray()
        length = 0
        more = True
        while more and length <= _READ_ON * limit:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            chunk = message.get("body", b"")
            more = message.get("more_body", False)
            length += len(chunk)
            if length <= limit:
                body += chunk
        if length > limit:
            raise BadRequest(
                f"the body is larger than {limit} bytes, the server's --max-body-bytes", status=413, code="body_too_large"
            )
        whole: Message | None = {"type": "http.request", "body": bytes(body), "more_body": False}

        async def replay() -> Message:
            nonlocal whole
            message, whole = whole, None
            return await receive() if message is None else message

        return replay


def error_response(error: ServeError) -> JSONResponse:
    """The HTTP response that says it."""
    return JSONResponse(error.body(), error.status, error.headers)


def too_late(timeout_s: float) -> TooLate:
    """The error of a request that took too long."""
    return TooLate(f"the request took longer than {timeout_s:g} s, the server's --timeout-s")


def _header(scope: Scope, name: bytes, default: bytes = b"") -> bytes:
    value: bytes
    for given, value in scope["headers"]:
        if given == name:
            return value
    return default


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name[1:-1] if name.startswith("[") and name.endswith("]") else name)
    except ValueError:
        return False
    return True


class TimedProtocol(H11Protocol):
    """One HTTP/1.1 connection. It is closed when the head of a request takes longer than HEAD_S, counted from the connection or its first
    byte."""

    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop_timer()

    def _watch(self) -> None:
        """The timer runs while a head is awaited, from its start."""
        if self.conn.their_state is not h11.IDLE or self.transport.is_closing():
            self._stop_timer()
        elif self._timer is None:
            self._timer = self.loop.call_later(HEAD_S, self._end)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _end(self) -> None:
        self.transport.write(_HEAD_TOO_LATE)
        self.transport.close()
