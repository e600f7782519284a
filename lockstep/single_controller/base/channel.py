"""A one-way channel from workers to the driver, for news while a call is still out.

It carries what can also be had from the call's result, only earlier: a message that is lost costs time, never a result.
"""

import contextlib
import os
import pickle
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Client, Connection, Listener
from typing import Any


class Outbox:
    """The workers' end: call it with a message. It can be pickled, connects at first use, and goes silent when the driver is gone."""

    def __init__(self, address: tuple[str, int], key: bytes) -> None:
        self._address, self._key = address, key
        self._connection: Connection | None = None
        self._is_broken = False

    def __call__(self, message: Any) -> None:
        if self._is_broken:
            return
        try:
            if self._connection is None:
                self._connection = Client(self._address, authkey=self._key)
            # Not `send`: torch teaches that to pass tensors by file descriptor, which works on one machine only.
            self._connection.send_bytes(pickle.dumps(message))
        except (OSError, EOFError):
            self._is_broken = True

    def __reduce__(self) -> tuple[Any, ...]:
        return Outbox, (self._address, self._key)


@contextmanager
def inbox(host: str, handle: Callable[[Any], None]) -> Iterator[Outbox]:
    """The driver's end: while it is open, every message sent through the yielded Outbox reaches `handle`, one at a time, on other threads.

    `host` is the driver's address as workers see it. After the block no message is handled any more.
    """
    key = os.urandom(32)
    listener = Listener((host, 0), authkey=key)
    lock, is_open = threading.Lock(), True

    def read(connection: Connection) -> None:
        with contextlib.suppress(OSError, EOFError), connection:
            while True:
                message = pickle.loads(connection.recv_bytes())
                with lock:
                    if not is_open:
                        return
                    handle(message)

    def accept() -> None:
        while is_open:
            with contextlib.suppress(Exception):  # a stranger that fails the challenge
                threading.Thread(target=read, args=(listener.accept(),), name="inbox", daemon=True).start()

    acceptor = threading.Thread(target=accept, name="inbox-accept", daemon=True)
    acceptor.start()
    try:
        yield Outbox(listener.address, key)
    finally:
        with lock:
            is_open = False
        with contextlib.suppress(OSError):
            socket.create_connection(listener.address, timeout=1).close()  # wakes the acceptor
        acceptor.join(timeout=5)
        listener.close()
