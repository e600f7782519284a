"""A one-way channel from workers to the driver, for news while a call is still out.

It carries what can also be had from the call's result, only earlier: a message that is lost costs time, never a result. So whoever is slow,
silent or sends too much is dropped, on both sides: a stranger that finds the port holds up nobody.

```text
driver  -> worker   32 random bytes
worker  -> driver   their HMAC with the key that came with the call; then messages, each with its length before it
```
"""

import contextlib
import hashlib
import hmac
import os
import pickle
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_HANDSHAKE_S = 5.0
"""Longest time for a connection to prove that it has the key."""
_SEND_S = 60.0
_MAX_STRANGERS = 64
"""Connections that have not proven it yet; one more ends the oldest."""
_MAX_BYTES = 1 << 26
"""Length of a message."""
_NONCE = 32
_LENGTH = struct.Struct("!Q")


class Outbox:
    """The workers' end: call it with a message. It can be pickled, connects at first use, and goes silent when the driver is gone."""

    def __init__(self, address: tuple[str, int], key: bytes) -> None:
        self._address = address
        self._key = key
        self._connection: socket.socket | None = None
        self._is_broken = False

    def __call__(self, message: Any) -> None:
        if self._is_broken:
            return
        try:
            if self._connection is None:
                self._connection = socket.create_connection(self._address, timeout=_HANDSHAKE_S)
                nonce = _receive(self._connection, _NONCE, time.monotonic() + _HANDSHAKE_S)
                self._connection.sendall(_proof(self._key, nonce))
                self._connection.settimeout(_SEND_S)
            raw = pickle.dumps(message)
            self._connection.sendall(_LENGTH.pack(len(raw)) + raw)
        except (OSError, EOFError):
            self._is_broken = True

    def __reduce__(self) -> tuple[Any, ...]:
        return Outbox, (self._address, self._key)


@contextmanager
def inbox(host: str, handle: Callable[[Any], None]) -> Iterator[Outbox]:
    """The driver's end: while it is open, every message sent through the yielded Outbox reaches `handle`, one at a time, on other threads.

    `host` is the driver's address as workers see it, the only one that is listened at. After the block no message is handled any more.
    """
    key = os.urandom(32)
    lock = threading.Lock()
    is_open = True
    strangers: list[socket.socket] = []
    known: list[socket.socket] = []

    def read(connection: socket.socket) -> None:
        with contextlib.suppress(OSError, EOFError, ValueError), connection:
            nonce = os.urandom(_NONCE)
            deadline = time.monotonic() + _HANDSHAKE_S
            connection.settimeout(_HANDSHAKE_S)
            connection.sendall(nonce)
            if not hmac.compare_digest(_receive(connection, len(_proof(key, nonce)), deadline), _proof(key, nonce)):
                return
            with lock:
                strangers.remove(connection)  # ValueError: it was dropped for another
                known.append(connection)
            while True:
                (size,) = _LENGTH.unpack(_receive(connection, _LENGTH.size))
                if size > _MAX_BYTES:
                    return
                message = pickle.loads(_receive(connection, size))
                with lock:
                    if not is_open:
                        return
                    handle(message)

    def accept() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:  # closed
                return
            with lock:
                strangers[:] = [stranger for stranger in strangers if stranger.fileno() >= 0]
                strangers.append(connection)
                if len(strangers) > _MAX_STRANGERS:
                    _end(strangers.pop(0))
            threading.Thread(target=read, args=(connection,), name="inbox", daemon=True).start()

    listener = socket.create_server((host, 0), backlog=_MAX_STRANGERS)
    acceptor = threading.Thread(target=accept, name="inbox-accept", daemon=True)
    acceptor.start()
    try:
        yield Outbox(listener.getsockname()[:2], key)
    finally:
        with lock:
            is_open = False
        _end(listener)  # wakes the acceptor
        acceptor.join(timeout=5)
        listener.close()
        with lock:
            for connection in (*strangers, *known):
                _end(connection)


def _proof(key: bytes, nonce: bytes) -> bytes:
    return hmac.digest(key, nonce, hashlib.sha256)


def _receive(connection: socket.socket, size: int, deadline: float | None = None) -> bytes:
    """That many bytes. Raises EOFError at the end, OSError at the deadline."""
    parts = bytearray()
    while len(parts) < size:
        connection.settimeout(None if deadline is None else max(0.001, deadline - time.monotonic()))
        chunk = connection.recv(min(size - len(parts), 1 << 20))
        if not chunk:
            raise EOFError
        parts += chunk
    return bytes(parts)


def _end(connection: socket.socket) -> None:
    """What waits for the connection goes on, with an error."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
