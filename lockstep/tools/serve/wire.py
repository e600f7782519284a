"""HTTP/1.1 as uvicorn speaks it, for clients that must say what they want in time."""

import asyncio

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_S = 30.0
"""How long the head of a request may take. After it the request has a deadline of its own; before it, nothing else ends the connection, and
each has a file handle."""
_LATE = b"HTTP/1.1 408 Request Timeout\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"


class TimedProtocol(H11Protocol):
    """One connection. It is closed when the head of a request takes longer than HEAD_S, counted from the connection or its first byte."""

    _head: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._forget()

    def _watch(self) -> None:
        """The timer runs while a head is awaited, from its start."""
        if self.conn.their_state is not h11.IDLE or self.transport.is_closing():
            self._forget()
        elif self._head is None:
            self._head = self.loop.call_later(HEAD_S, self._end)

    def _forget(self) -> None:
        if self._head is not None:
            self._head.cancel()
            self._head = None

    def _end(self) -> None:
        self.transport.write(_LATE)
        self.transport.close()
