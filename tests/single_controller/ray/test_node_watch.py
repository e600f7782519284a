"""Whether nodes can be reached, with ports of this machine for nodes."""

import socket
from types import SimpleNamespace

import pytest

from lockstep.single_controller.ray import node_watch
from lockstep.single_controller.ray.node_watch import NodeWatch, connect_all


@pytest.fixture
def server():
    with socket.create_server(("127.0.0.1", 0)) as opened:
        yield opened


@pytest.fixture
def closed_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))  # bound but not listening: refused, and nobody else gets it
        yield one.getsockname()[1]


def test_who_listens_is_reached_and_who_does_not_is_not(server, closed_port):
    nodes = {"up": server.getsockname(), "down": ("127.0.0.1", closed_port)}
    assert connect_all(nodes, timeout_s=5.0).keys() == {"up"}


def test_who_had_connected_while_this_process_was_stopped_was_reached(server, monkeypatch):
    calls = []

    def monotonic():
        calls.append(None)
        if len(calls) == 2:
            server.accept()[0].close()
        return 0.0 if len(calls) == 1 else 1000.0

    monkeypatch.setattr(node_watch, "time", SimpleNamespace(monotonic=monotonic))
    assert connect_all({"up": server.getsockname()}, timeout_s=5.0).keys() == {"up"}


def test_a_node_is_lost_that_was_reached_and_then_asked_in_vain_for_a_while(server):
    now = [100.0]
    watch = NodeWatch({"a": server.getsockname()}, clock=lambda: now[0])
    watch.ask()
    server.close()
    for now[0] in (106.0, 112.0):
        watch.ask()
        assert watch.unreachable(15.0) == {}
    now[0] = 115.0
    watch.ask()
    ((node, text),) = watch.unreachable(15.0).items()
    assert node == "a"
    assert f"127.0.0.1:{watch._nodes['a'][1]} could not be reached for 15 s" in text


def test_no_node_is_lost_when_this_process_was_stopped(server):
    now = [0.0]
    watch = NodeWatch({"a": server.getsockname()}, clock=lambda: now[0])
    watch.ask()
    now[0] = 1000.0
    assert watch.unreachable(15.0) == {}
    with socket.socket() as other:
        watch._nodes["a"] = other.getsockname()  # the network comes back a little later
        watch.ask()
    assert watch.unreachable(15.0) == {}
    watch._nodes["a"] = server.getsockname()
    for now[0] in (1006.0, 2000.0, 3000.0):
        watch.ask()
        assert watch.unreachable(15.0) == {}


def test_a_node_that_was_never_reached_is_not_judged(closed_port):
    now = [0.0]
    watch = NodeWatch({"a": ("127.0.0.1", closed_port)}, clock=lambda: now[0])
    watch.ask()
    now[0] = 1000.0
    assert watch.unreachable(15.0) == {}


def test_a_slow_node_is_named_once_a_minute(monkeypatch, capsys):
    now = [0.0]
    monkeypatch.setattr(node_watch, "connect_all", lambda nodes, timeout_s: {"a": 1.7, "b": 0.01})
    watch = NodeWatch({"a": ("10.0.0.1", 7), "b": ("10.0.0.2", 7)}, clock=lambda: now[0])
    for now[0] in (0.0, 30.0, 61.0):
        watch.ask()
    told = capsys.readouterr().err.splitlines()
    assert told == ["lockstep: warning: node 10.0.0.1:7 is slow: a connection took 1.7 s"] * 2
