import contextlib
import functools
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from helpers.processes import are_gone

from lockstep.processes import CallCrashed, CallFailed, CallTimeout, KillableWorker, is_portable


def add(a, b):
    return a + b


def shout(text):
    print(text)
    return os.getpid()


def echo(value):
    return value


def fail(text):
    raise ValueError(text)


def leave(code):
    sys.exit(code)


def end(code):
    os._exit(code)


def backtrack():
    return re.match(r"(a+)+$", "a" * 40 + "b")


def start_and_hang():
    child = subprocess.Popen(["sleep", "1000"])
    with open(os.environ["PID_FILE"], "w") as file:
        file.write(str(child.pid))
    time.sleep(1000)


ESCAPE = "import os, time; os.setsid(); os.fork() and os._exit(0); os.setsid(); time.sleep(1000)"


def start_daemons(mark):
    """Processes in sessions of their own, whose parents have ended."""
    for _ in range(3):
        subprocess.run([sys.executable, "-c", ESCAPE, mark], check=True)


def daemons_and_hang(mark):
    start_daemons(mark)
    time.sleep(1000)


def hold(megabytes):
    return len(bytearray(megabytes << 20))


async def later(value):
    return value


def a_lambda():
    return lambda: 1


@pytest.fixture(scope="module")
def worker():
    worker = KillableWorker()
    yield worker
    worker.close()


def test_calls_are_computed_in_one_other_process(worker):
    assert worker.call(add, 5, a=1, b=2) == 3
    assert worker.call(functools.partial(add, 10), 5, b=2) == 12
    assert worker.call(later, 5, value="x") == "x"
    first, second = worker.call(shout, 5, text="to stderr"), worker.call(shout, 5, text="again")
    assert first == second != os.getpid()


@pytest.mark.parametrize("call", [(fail, {"text": "why"}), (leave, {"code": 3}), (a_lambda, {})])
def test_a_function_that_raises_says_so_and_the_process_goes_on(worker, call):
    pid = worker.call(shout, 5, text="")
    with pytest.raises(CallFailed) as caught:
        worker.call(call[0], 5, **call[1])
    assert call[0].__name__ in str(caught.value)
    assert worker.call(shout, 5, text="") == pid


def test_a_regular_expression_that_backtracks_is_killed_at_its_deadline(worker):
    started = time.monotonic()
    with pytest.raises(CallTimeout, match="0.3 s"):
        worker.call(backtrack, 0.3)
    assert time.monotonic() - started < 5
    assert worker.call(add, 5, a=1, b=1) == 2


@pytest.mark.parametrize("length", [1, 1_000_000])
def test_a_request_that_the_child_does_not_read_has_the_same_deadline_however_long_it_is(worker, length):
    """A pipe holds 64 KiB. The child stands still as one does whose interpreter the thread of an earlier call keeps."""
    pid = worker.call(shout, 60, text="")
    os.kill(pid, signal.SIGSTOP)
    with ThreadPoolExecutor(1) as caller:
        try:
            assert isinstance(caller.submit(worker.call, shout, 0.3, text="x" * length).exception(60), CallTimeout)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
    assert worker.call(add, 60, a=1, b=2) == 3


def test_a_request_of_many_pipes_full_arrives_whole(worker):
    text = "".join(map(str, range(1_000_000)))
    assert worker.call(echo, 60, value=text) == text


def test_what_the_function_started_dies_with_it(worker, tmp_path, monkeypatch):
    monkeypatch.setenv("PID_FILE", str(tmp_path / "pid"))
    fresh = KillableWorker()
    with pytest.raises(CallTimeout):
        fresh.call(start_and_hang, 4.0)
    grandchild = int((tmp_path / "pid").read_text())
    assert are_gone([grandchild])
    fresh.close()


def test_a_process_that_ends_during_the_call_is_named_with_its_exit_code(worker):
    with pytest.raises(CallCrashed, match="exit code 7"):
        worker.call(end, 5, code=7)
    assert worker.call(add, 5, a=1, b=1) == 2


def test_functions_that_another_process_cannot_find_are_refused(worker):
    assert is_portable(add)
    assert is_portable(functools.partial(add, 1))
    for function in (lambda: 1, a_lambda()):
        assert not is_portable(function)
        with pytest.raises(ValueError, match="top of a module"):
            worker.call(function, 5)


def test_children_end_when_their_parent_is_killed(tmp_path):
    script = tmp_path / "parent.py"
    script.write_text(
        "import functools, os, threading, time\n"
        "from lockstep.processes import KillableWorker\n"
        "worker = KillableWorker()\n"
        "print(worker.call(os.getpid, 5), flush=True)\n"
        "threading.Thread(target=worker.call, args=(functools.partial(time.sleep, 1000), 1000), daemon=True).start()\n"
        "time.sleep(1000)\n"
    )
    environment = os.environ | {"PYTHONPATH": os.getcwd()}
    parent = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True, env=environment)
    child = int(parent.stdout.readline())
    time.sleep(0.5)
    parent.kill()
    parent.wait()
    assert are_gone([child])


def _marked(mark):
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            found += [process.pid] if mark in process.cmdline() and process.status() != psutil.STATUS_ZOMBIE else []
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="the guard is of Linux")
@pytest.mark.parametrize("end", ["close", "timeout", "crash"])
def test_daemons_that_a_function_started_end_with_its_process(end):
    mark, worker = f"mark-{os.getpid()}-{end}", KillableWorker()
    if end == "timeout":
        with pytest.raises(CallTimeout):
            worker.call(daemons_and_hang, 3.0, mark=mark)
    else:
        worker.call(start_daemons, 20, mark=mark)
        assert len(_marked(mark)) == 3
        if end == "crash":
            with pytest.raises(CallCrashed, match="SIGKILL"):
                worker.call(kill_me, 5)
        worker.close()
    assert _marked(mark) == []


def kill_me():
    os.kill(os.getpid(), 9)


@pytest.mark.skipif(sys.platform != "linux", reason="the guard is of Linux")
def test_daemons_end_when_the_parent_is_killed(tmp_path):
    mark = f"mark-{os.getpid()}-killed"
    script = tmp_path / "parent.py"
    script.write_text(
        "import sys, time\nsys.path.insert(0, sys.argv[2])\nfrom test_processes import start_daemons\n"
        "from lockstep.processes import KillableWorker\nworker = KillableWorker()\n"
        "print(worker.call(start_daemons, 20, mark=sys.argv[1] + '-killed'), flush=True)\ntime.sleep(1000)\n"
    )
    here = Path(__file__).parent
    command = [sys.executable, str(script), mark.removesuffix("-killed"), str(here)]
    environment = os.environ | {"PYTHONPATH": f"{os.getcwd()}:{here.parent}"}  # with helpers, which that file imports
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    assert parent.stdout.readline() == "None\n"
    assert len(_marked(mark)) == 3
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 10
    while _marked(mark):
        assert time.monotonic() < deadline, "daemons live on"
        time.sleep(0.05)


def test_memory_of_the_process_is_limited():
    worker = KillableWorker(max_memory_mb=512)
    assert worker.call(hold, 10, megabytes=100) == 100 << 20
    with pytest.raises(CallFailed, match="MemoryError"):
        worker.call(hold, 10, megabytes=1000)
    worker.close()
