"""Tools of MCP servers that speak over stdin and stdout: what `agent.mcp='["COMMAND"]'` starts. Needs the extra `mcp`.

Every episode has servers of its own, so that episodes do not see each other; the first call of a server's tools starts it. A server that
cannot be started, dies or breaks the protocol is a failure of the environment; an error that a tool reports is text for the policy.
"""

import asyncio
import contextlib
import functools
import shlex
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any

from lockstep.agents.tools import Tool, ToolError
from lockstep.errors import ConfigError, MissingExtra


class Server:
    """One server process, which `call` starts and `close` ends. A pickled copy has not been started."""

    def __init__(self, command: str, timeout_s: float) -> None:
        """`timeout_s` limits the start and each call."""
        self._command = command
        self._timeout_s = timeout_s
        self._loop: asyncio.AbstractEventLoop | None = None
        self._session: Any = None
        self._ended: Future[None] = Future()
        self._stop: asyncio.Event | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return Server, (self._command, self._timeout_s)

    def tools(self) -> list[Any]:
        """Return the server's list of tools."""
        return list(self._ask(lambda session: session.list_tools()).tools)

    def call(self, name: str, arguments: dict[str, Any]) -> str:
        """Return the text of a tool's result. Raise ToolError for an error that the tool reports."""
        result = self._ask(lambda session: session.call_tool(name, arguments))
        text = "\n".join(getattr(part, "text", f"({part.type})") for part in result.content)
        if result.is_error:
            raise ToolError(text)
        return text

    def close(self) -> None:
        """End the process if it runs."""
        loop = self._loop
        self._loop = None
        self._session = None
        if loop is None:
            return
        with contextlib.suppress(RuntimeError):  # its loop has ended: it could not be started, or it died
            if self._stop is not None:
                loop.call_soon_threadsafe(self._stop.set)
        self._ended.result()

    def _ask(self, question: Callable[[Any], Coroutine[Any, Any, Any]]) -> Any:
        if self._loop is None:
            self._start()
        assert self._loop is not None
        try:
            return asyncio.run_coroutine_threadsafe(self._in_time(question), self._loop).result()
        except Exception as error:
            self.close()
            raise RuntimeError(f"the MCP server {self._command!r} failed: {self._told(error)}") from error

    async def _in_time(self, question: Callable[[Any], Coroutine[Any, Any, Any]]) -> Any:
        async with asyncio.timeout(self._timeout_s):
            return await question(self._session)

    def _start(self) -> None:
        started: Future[Any] = Future()
        self._loop = asyncio.new_event_loop()
        self._ended = Future()
        threading.Thread(target=self._run, args=(self._loop, started), name="mcp", daemon=True).start()
        try:
            self._session = started.result()
        except Exception as error:
            self.close()
            raise RuntimeError(f"the MCP server {self._command!r} cannot be started: {self._told(error)}") from error

    def _told(self, error: BaseException) -> str:
        while isinstance(error, BaseExceptionGroup):  # tasks of the package, each with its own
            error = error.exceptions[0]
        if isinstance(error, TimeoutError):
            return f"it did not answer within {self._timeout_s:g} s"
        return f"{type(error).__name__}: {error}"

    def _run(self, loop: asyncio.AbstractEventLoop, started: Future[Any]) -> None:
        """Run the whole session in one task of one thread: its context managers must be left in the task that entered them."""
        try:
            loop.run_until_complete(self._serve(started))
        except BaseException as error:
            if not started.done():
                started.set_exception(error)
        finally:
            loop.close()
            self._ended.set_result(None)

    async def _serve(self, started: Future[Any]) -> None:
        import anyio
        from mcp import ClientSession, StdioServerParameters
        from mcp.client.stdio import stdio_client

        self._stop = asyncio.Event()
        program, *arguments = shlex.split(self._command)
        async with (
            stdio_client(StdioServerParameters(command=program, args=arguments)) as (reads, writes),
            ClientSession(reads, writes) as session,
        ):
            with anyio.fail_after(self._timeout_s):
                await session.initialize()
            started.set_result(session)
            await self._stop.wait()


class ServerTool:
    """A function of a server. Tools of one server share the server."""

    def __init__(self, server: Server, name: str) -> None:
        self._server = server
        self._name = name

    def __call__(self, **arguments: Any) -> str:
        return self._server.call(self._name, arguments)

    def close(self) -> None:
        """End the server: the episode is over."""
        self._server.close()


def mcp_tools(command: str, timeout_s: float) -> list[Tool]:
    """Return the tools of a server for one episode. The list is requested once per process.

    Raise ConfigError if the server fails, MissingExtra without the package mcp.
    """
    server = Server(command, timeout_s)
    return [
        Tool(schema["function"]["name"], schema, ServerTool(server, schema["function"]["name"]))
        for schema in _schemas(command, timeout_s)
    ]


@functools.cache
def _schemas(command: str, timeout_s: float) -> list[dict[str, Any]]:
    try:
        import mcp  # noqa: F401
    except ImportError as error:
        raise MissingExtra(f"agent.mcp: {command!r}", "mcp", "mcp") from error
    if not command.strip():
        raise ConfigError("agent.mcp: a server's command is empty")
    server = Server(command, timeout_s)
    try:
        found = server.tools()
    except RuntimeError as error:
        raise ConfigError(f"agent.mcp: {error}") from error
    finally:
        server.close()
    if not found:
        raise ConfigError(f"agent.mcp: the server {command!r} has no tools")
    return [
        {
            "type": "function",
            "function": {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema},
        }
        for tool in found
    ]
