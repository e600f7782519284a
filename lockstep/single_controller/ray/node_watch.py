"""NodeWatch: whether the machines of a group can still be reached. Ray itself takes up to a minute to say that a network is cut.

Every few seconds each node's Ray daemon is asked for a connection. The system of that machine grants it, however busy the daemon is, so
only a machine that is gone, cut off, or behind a network that no longer carries anything fails to.
"""

import contextlib
import errno
import select
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping

Address = tuple[str, int]

_EVERY_S = 3.0
_SLOW_S = 1.0
"""A connection that takes longer is worth a line."""
_SAY_AGAIN_S = 60.0


class NodeWatch:
    """Asks the nodes (name -> address) from a thread of its own, from `start` to `stop`. A node that was never reached from here is not
    judged: it may be behind something that lets Ray through alone."""

    def __init__(self, nodes: Mapping[str, Address], clock: Callable[[], float] = time.monotonic) -> None:
        self._nodes = dict(nodes)
        self._clock = clock
        self._silent: dict[str, float] = {}
        """For how many seconds each node was asked in vain."""
        self._asked = clock()
        self._said: dict[str, float] = {}
        self._stopped = threading.Event()

    def start(self) -> None:
        """Begin."""
        threading.Thread(target=self._watch, name="node watch", daemon=True).start()

    def stop(self) -> None:
        """End. May be called again."""
        self._stopped.set()

    def unreachable(self, for_s: float) -> dict[str, str]:
        """Node -> what is wrong, of those that were asked in vain for so long."""
        late = {node: silent for node, silent in self._silent.items() if silent >= for_s}
        return {
            node: f"{':'.join(map(str, self._nodes[node]))} could not be reached for {silent:.0f} s: the machine is down, its Ray daemon "
            "has ended, or the network between it and this one is cut or too slow"
            for node, silent in late.items()
        }

    def ask(self) -> dict[str, float]:
        """Ask every node once; returns the seconds that those who answered took."""
        took = connect_all(self._nodes, _EVERY_S)
        now = self._clock()
        # What is longer than a pause and an ask is time in which this process did not run: it was stopped, or its machine was.
        passed = min(now - self._asked, 2 * _EVERY_S)
        self._asked = now
        asked = took.keys() | self._silent.keys()
        self._silent = {node: 0.0 if node in took else self._silent[node] + passed for node in asked}
        for node, seconds in took.items():
            if seconds >= _SLOW_S and now - self._said.get(node, -_SAY_AGAIN_S) >= _SAY_AGAIN_S:
                self._said[node] = now
                where = ":".join(map(str, self._nodes[node]))
                print(f"lockstep: warning: node {where} is slow: a connection took {seconds:.1f} s", file=sys.stderr, flush=True)
        return took

    def _watch(self) -> None:
        while not self._stopped.is_set():
            self.ask()
            self._stopped.wait(_EVERY_S)


def connect_all(nodes: Mapping[str, Address], timeout_s: float) -> dict[str, float]:
    """Connect to all addresses at once, and hang up; returns the seconds that each took, of those that were there in time."""
    started = time.monotonic()
    took = dict[str, float]()
    with contextlib.ExitStack() as stack:
        poll = select.poll()
        waiting = dict[int, tuple[str, socket.socket]]()
        for node, (host, port) in nodes.items():
            try:
                family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
                connection = stack.enter_context(socket.socket(family, kind, protocol))
                connection.setblocking(False)
                if connection.connect_ex(address) not in (0, errno.EINPROGRESS):
                    continue
            except OSError:
                continue
            waiting[connection.fileno()] = node, connection
            poll.register(connection, select.POLLOUT)
        # After the time is up too it looks once more: this process may not have run meanwhile.
        while waiting and (ready := poll.poll(1000 * max(0.0, started + timeout_s - time.monotonic()))):
            for descriptor, _ in ready:
                node, connection = waiting.pop(descriptor)
                poll.unregister(descriptor)
                if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0:
                    took[node] = time.monotonic() - started
    return took
