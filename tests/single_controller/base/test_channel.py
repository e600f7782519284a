import contextlib
import pickle
import socket
import threading

import pytest

from lockstep.single_controller.base import channel
from lockstep.single_controller.base.channel import inbox


def test_messages_of_several_senders_arrive_and_none_is_handled_after_the_block():
    received, enough = [], threading.Event()

    def handle(message):
        received.append(message)
        if len(received) == 20:
            enough.set()

    with inbox("127.0.0.1", handle) as send:
        senders = [pickle.loads(pickle.dumps(send)) for _ in range(2)]
        for i in range(10):
            for number, sender in enumerate(senders):
                sender((number, i))
        assert enough.wait(10)
    assert sorted(received) == [(number, i) for number in range(2) for i in range(10)]
    for sender in senders:
        for _ in range(3):
            sender("late")  # the driver is gone: no error, no effect
    assert len(received) == 20


def test_a_message_that_cannot_be_handled_ends_neither_the_driver_nor_the_sender():
    with inbox("127.0.0.1", lambda message: 1 / 0) as send:
        send("one")
        send("two")


def test_the_block_ends_when_its_body_raises():
    with pytest.raises(KeyError), inbox("127.0.0.1", print):
        raise KeyError


def test_strangers_hold_up_nobody_and_are_dropped(monkeypatch):
    """A silent connection, one that says the wrong thing, and more of them than are kept."""
    monkeypatch.setattr(channel, "_HANDSHAKE_S", 600.0)  # what would wait for one of them would not end here
    received, arrived = [], threading.Event()

    def handle(message):
        received.append(message)
        arrived.set()

    with inbox("127.0.0.1", handle) as send:
        strangers = [socket.create_connection(send._address) for _ in range(channel._MAX_STRANGERS + 3)]
        strangers[-1].sendall(bytes(100))
        send("news")
        assert arrived.wait(60)
        for stranger in (*strangers[:3], strangers[-1]):  # the oldest and the liar
            assert _is_ended(stranger)
        assert received == ["news"]
    assert not [thread for thread in threading.enumerate() if thread.name == "inbox-accept"]


def test_a_silent_stranger_is_dropped_at_the_deadline(monkeypatch):
    monkeypatch.setattr(channel, "_HANDSHAKE_S", 0.1)
    with inbox("127.0.0.1", print) as send:
        assert _is_ended(socket.create_connection(send._address))


def _is_ended(connection: socket.socket) -> bool:
    """Reads on until the other side ends the connection. Raises TimeoutError if it does not."""
    connection.settimeout(60)
    with contextlib.suppress(ConnectionError):
        while connection.recv(1000):
            pass
    return True


def test_a_message_that_is_too_long_ends_its_connection_and_no_other(monkeypatch):
    monkeypatch.setattr(channel, "_MAX_BYTES", 1000)
    received, arrived = [], threading.Event()

    def handle(message):
        received.append(message)
        arrived.set()

    with inbox("127.0.0.1", handle) as send:
        other = pickle.loads(pickle.dumps(send))
        other("x" * 2000)
        send("news")
        assert arrived.wait(10)
        other._connection.settimeout(5)
        with contextlib.suppress(ConnectionError):
            assert other._connection.recv(1) == b""
    assert received == ["news"]


def test_only_the_address_that_is_needed_listens():
    with inbox("127.0.0.1", print) as send, socket.socket() as other:
        other.bind(("127.0.0.2", send._address[1]))  # would be taken by a socket that listens everywhere
