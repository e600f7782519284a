"""An object in a process of its own: what it says, when it dies, when it hangs."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest
from helpers.processes import are_gone

from lockstep.backends.process import EngineProcess, Exchange
from lockstep.errors import WorkerDied, WorkerError, WorkerTimeout

TARGET = "process_target:Counter"


@pytest.fixture(scope="module", autouse=True)
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A module that the child can import: its search path is ours."""
    folder = tmp_path_factory.mktemp("target")
    (folder / "process_target.py").write_text(
        textwrap.dedent("""
        import time

        class Counter:
            def __init__(self, start):
                print("counting from", start)
                self.start, self.closed = int(start), 0

            def count(self, n, pause_s=0.0):
                try:
                    for i in range(n):
                        time.sleep(pause_s)
                        yield self.start + i
                        yield None
                finally:
                    self.closed += 1

            def closed_streams(self):
                yield self.closed

            def fail(self):
                yield 1
                raise KeyError("no such thing")

            def add_up(self):
                total = 0
                while True:
                    messages = yield total or "idle"
                    for message in messages or ():
                        total = total + message if message else 1 / 0
        """)
    )
    sys.path.insert(0, str(folder))
    yield
    sys.path.remove(str(folder))


@pytest.fixture
def process() -> Iterator[EngineProcess]:
    process = EngineProcess("counter", TARGET, {"start": 5}, {}, start_s=60.0, silence_s=30.0)
    yield process
    process.close()


def test_values_come_as_they_are_made_errors_with_their_traceback_and_a_stream_can_be_given_up(process: EngineProcess) -> None:
    assert list(process.stream("count", 3)) == [5, 6, 7]
    assert process.call("count", 2) == 6
    with pytest.raises(WorkerError, match=r"worker counter \(pid \d+\) failed:[\s\S]*no such thing"):
        process.call("fail")
    stream = process.stream("count", 10_000, 0.01)
    assert next(stream) == 5
    stream.close()
    assert process.call("closed_streams") == 3
    stream = process.stream("count", 1)
    assert next(stream) == 5
    stream.close()
    assert list(process.stream("count", 2)) == [5, 6]


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


@contextmanager
def interrupted(process: EngineProcess, where: str = "poll") -> Iterator[None]:
    """Inside, an interrupt comes while the process is waited for (or a message is moved)."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(process._connection, where, interrupt)
        yield


def test_what_a_call_answers_after_it_was_interrupted_is_no_answer_to_the_next(process: EngineProcess) -> None:
    stream = process.stream("count", 3)
    assert next(stream) == 5
    with interrupted(process):
        next(stream)
    with interrupted(process):
        process.call("fail")
    assert list(process.stream("count", 1)) == [5]
    exchange = Exchange(process, "add_up")
    exchange.send(3)
    with interrupted(process):
        exchange.receive(60.0)
    exchange.close()
    exchange = Exchange(process, "add_up")
    exchange.send(1)
    assert exchange.receive(60.0) == 1
    exchange.close()
    assert process.call("closed_streams") == 2


@pytest.mark.parametrize("move", ["send_bytes", "recv_bytes"])
def test_a_child_is_ended_when_a_message_was_moved_in_part(process: EngineProcess, move: str) -> None:
    with interrupted(process, move):
        process.call("count", 1)
    with pytest.raises(WorkerDied, match="killed by SIGKILL"):
        process.call("count", 1)


def test_a_child_that_is_killed_is_an_error_at_once_with_the_end_of_its_output(process: EngineProcess) -> None:
    stream = process.stream("count", 1000, 0.05)
    next(stream)
    os.kill(process.pid, signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(WorkerDied, match=r"during count\(\) \(killed by SIGKILL\)"):
        list(stream)
    with pytest.raises(WorkerDied):
        process.call("count", 1)
    assert time.monotonic() - started < 10


def test_a_child_that_hangs_is_killed_after_the_deadline(process: EngineProcess) -> None:
    process._silence_s = 0.5
    os.kill(process.pid, signal.SIGSTOP)
    with pytest.raises(WorkerTimeout, match=r"count\(\) gave no sign of life for 0.5 s, and it was killed"):
        process.call("count", 1)
    assert not psutil.pid_exists(process.pid)


def test_a_child_that_takes_no_message_is_killed_after_the_deadline() -> None:
    process = EngineProcess("counter", TARGET, {"start": 5}, {}, start_s=60.0, silence_s=0.5)
    os.kill(process.pid, signal.SIGSTOP)
    with pytest.raises(WorkerTimeout, match=r"a message to it gave no sign of life for 0.5 s, and it was killed"):
        process.call("count", bytes(1 << 24))  # more than a pipe holds
    assert not psutil.pid_exists(process.pid)


def test_a_target_that_cannot_be_built_is_its_own_error() -> None:
    with pytest.raises(WorkerError, match="invalid literal for int"):
        EngineProcess("counter", TARGET, {"start": "x"}, {}, start_s=60.0, silence_s=30.0)


def test_a_child_ends_with_its_parent() -> None:
    program = (
        "import sys, time; sys.path[:0] = sys.argv[1:]\n"
        "from lockstep.backends.process import EngineProcess, Exchange\n"
        f"print(EngineProcess('counter', {TARGET!r}, {{'start': 1}}, {{}}, start_s=60, silence_s=60).pid, flush=True); time.sleep(60)"
    )
    parent = subprocess.Popen([sys.executable, "-c", program, *filter(None, sys.path)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert are_gone([child])


def test_an_exchange_goes_both_ways_and_its_error_ends_it(process: EngineProcess) -> None:
    exchange = Exchange(process, "add_up")
    assert exchange.receive(0.0) is None  # it waits for a message
    exchange.send(3)
    assert exchange.receive(60.0) == 3
    exchange.close()
    exchange = Exchange(process, "add_up")
    exchange.send(0)
    with pytest.raises(WorkerError, match="ZeroDivisionError"):
        exchange.receive(60.0)
    exchange.send(3)  # as if it had been on its way
    exchange.close()
    assert list(process.stream("count", 2)) == [5, 6]


def test_an_exchange_with_a_child_that_is_killed_leaves_no_stream_open(process: EngineProcess) -> None:
    exchange = Exchange(process, "add_up")
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(WorkerDied, match=r"during add_up\(\) \(killed by SIGKILL\)"):
        exchange.receive(60.0)
    exchange.close()
    with pytest.raises(WorkerDied):
        Exchange(process, "add_up")


def test_an_exchange_can_be_closed_after_its_process(process: EngineProcess) -> None:
    exchange = Exchange(process, "add_up")
    process.close()
    exchange.close()
