"""What stands before every handler: the API key, the longest time, and one form for errors. Plain ASGI, so that it sees what is sent."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import socket
import traceback
from collections.abc import Sequence
from typing import TYPE_CHECKING

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse

from lockstep.tools.serve.answers import NoAnswer, error_body
from lockstep.tools.serve.desk import EngineBroken, QueueFull, ShuttingDown
from lockstep.tools.serve.fields import BadRequest, shortened
from lockstep.tools.serve.metrics import Metrics

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

OPEN_PATHS = ("/health",)
"""What needs no key: a load balancer asks it."""
CLIENT_GONE = 499
"""The status that is counted where the client did not wait for one."""
_TO_SEND_S = 30.0
"""After a request's deadline, how long a client may take to read the answer."""


class TooLate(Exception):
    """A request's deadline passed."""


class Gate:
    """Checks the key and the Host header, limits the time, answers what handlers raise, counts what is answered."""

    def __init__(
        self,
        app: ASGIApp,
        metrics: Metrics,
        paths: frozenset[str],
        api_key: str | None,
        timeout_s: float,
        allowed_hosts: Sequence[str],
    ) -> None:
        self._app, self._metrics, self._paths, self._timeout_s = app, metrics, paths, timeout_s
        self._hosts = {"localhost", socket.gethostname().lower(), *(name.lower() for name in allowed_hosts)}
        self._expected = None if api_key is None else f"Bearer {api_key}".encode()

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

        try:
            async with asyncio.timeout(self._timeout_s + _TO_SEND_S):
                await self._answer(scope, receive, counted)
        except (ClientDisconnect, TimeoutError):  # nobody reads any more
            pass
        finally:
            path = scope["path"] if scope["path"] in self._paths else "other"  # a name for each guess would fill the memory
            self._metrics.responses[path, status] += 1

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def watched(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            self._check_host(scope)
            self._check_key(scope)
            # With an app in the scope, starlette raises what it would otherwise answer itself.
            await self._app({**scope, "app": self}, receive, watched)
        except ClientDisconnect:
            raise
        except Exception as error:
            if started:
                raise
            await error_response(error)(scope, receive, send)

    def _check_host(self, scope: Scope) -> None:
        """Raise BadRequest for a name that is not known to be this machine's.

        The browser of a user of this machine takes a page of that name for a part of this server when the name is made to lead here. An
        address is not such a name, and with a key the page cannot ask for anything.
        """
        if self._expected is not None or "*" in self._hosts:
            return
        given = next((value for name, value in scope["headers"] if name == b"host"), b"localhost").decode("latin-1").lower()
        name = given.rpartition(":")[0] if given.rpartition(":")[2].isdecimal() else given
        if name not in self._hosts and not _is_address(name):
            raise BadRequest(
                f"the Host header names {shortened(name)!r}, which this server does not answer for; start it with "
                "--allowed-hosts NAME, or use its address",
                status=403,
                code="host_not_allowed",
            )

    def _check_key(self, scope: Scope) -> None:
        if self._expected is None or scope["path"] in OPEN_PATHS:
            return
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        if not hmac.compare_digest(given, self._expected):
            raise BadRequest(
                "the API key is missing or wrong; send it as Authorization: Bearer KEY", status=401, code="invalid_api_key"
            )


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name[1:-1] if name.startswith("[") and name.endswith("]") else name)
    except ValueError:
        return False
    return True


def error_response(error: Exception) -> JSONResponse:
    """What the client is told of an exception; one that is not known here is a bug, and its traceback is printed."""
    status, body = error_answer(error)
    headers = {"Retry-After": "1"} if status == 429 else {"WWW-Authenticate": "Bearer"} if status == 401 else None
    return JSONResponse(body, status, headers)


def error_answer(error: Exception) -> tuple[int, dict[str, object]]:
    """HTTP status and body of an exception."""
    match error:
        case BadRequest():
            return error.status, error_body(error.message, "invalid_request_error", error.param, error.code)
        case QueueFull():
            return 429, error_body(str(error), "rate_limit_error", code="queue_full")
        case ShuttingDown():
            return 503, error_body(str(error), "server_error", code="shutting_down")
        case EngineBroken():
            return 500, error_body(str(error), "server_error", code="engine_broken")
        case NoAnswer():
            return 500, error_body(str(error), "server_error", code="no_answer")
        case TooLate():
            return 504, error_body(str(error), "server_error", code="deadline")
        case HTTPException():
            return error.status_code, error_body(str(error.detail), "invalid_request_error")
    traceback.print_exception(error)
    return 500, error_body(f"{type(error).__name__} inside the server; its log has the traceback", "server_error", code="internal")
