from __future__ import annotations

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from lockstep.errors import ResourceError
from lockstep.judging.sandbox import LocalSandbox, ProgramLimits, local
from lockstep.judging.sandbox.isolation import find_isolation


def test_a_program_reads_stdin_and_writes_both_streams(sandbox):
    program = "import sys\nname = input()\nprint('hello', name, sys.stdin.read())\nprint('aside', file=sys.stderr)"
    result = sandbox.run(program, stdin="wörld\nrest\n")
    assert (result.status, result.exit_code, result.stdout, result.stderr) == ("ok", 0, "hello wörld rest\n\n", "aside\n")
    assert 0 < result.seconds < 3


@pytest.mark.parametrize(
    ("program", "status", "exit_code", "message"),
    [
        ("raise SystemExit(3)", "error", 3, ""),
        ("1 / 0", "error", 1, "ZeroDivisionError"),
        ("def", "error", 1, "SyntaxError"),
        ("\0", "error", 1, "null bytes"),
        ("x = '\ud800'", "error", 1, "SyntaxError"),
        ("import os; os._exit(0)", "ok", 0, ""),
        ("import ctypes; ctypes.string_at(0)", "killed", 139, ""),
        ("import numpy", "error", 1, "ModuleNotFoundError"),
    ],
)
def test_how_a_program_ends_is_told(sandbox, program, status, exit_code, message):
    result = sandbox.run(program)
    assert (result.status, result.exit_code) == (status, exit_code)
    assert message in result.stderr


def test_it_is_the_main_module_of_a_plain_interpreter(sandbox):
    program = (
        "import concurrent.futures, dataclasses, pickle, sys\n"
        "@dataclasses.dataclass\nclass P:\n    x: int\n"
        "print(__name__, pickle.loads(pickle.dumps(P(3))), sys.argv, sys.flags.isolated, sys.flags.no_site)\n"
        "print(sorted(name for name in globals() if not name.startswith('__')))\n"
        "print(list(concurrent.futures.ThreadPoolExecutor(2).map(len, ['a', 'bc'])))"
    )
    assert sandbox.run(program).stdout.splitlines() == [
        "__main__ P(x=3) ['program.py'] 1 1",
        "['P', 'concurrent', 'dataclasses', 'pickle', 'program', 'sys']",
        "[1, 2]",
    ]


def test_output_that_is_not_text_is_replaced(sandbox):
    assert sandbox.run(r"import os; os.write(1, b'a\xff\xfe\x00b')").stdout == "a\ufffd\ufffd\x00b"


def test_a_program_and_its_input_may_be_megabytes(sandbox):
    program = "x = [\n" + "".join(f"    {i:09},\n" for i in range(10**9, 10**9 + 70_000)) + "]\nprint(len(x), len(input()))"
    assert len(program) > 1_000_000
    assert sandbox.run(program, "y" * 3_000_000, wall_s=20).stdout == "70000 3000000\n"


def test_closing_kills_the_programs_that_run(sandbox):
    mine = LocalSandbox(max_concurrent=2, limits=sandbox.limits)
    with ThreadPoolExecutor(2) as threads:
        calls = [threads.submit(mine.run, "while True: pass", "", 60.0) for _ in range(2)]
        while len(mine._running) < 2:
            time.sleep(0.01)
        began = time.monotonic()
        mine.close()
        assert time.monotonic() - began < 5
        for call in calls:
            with pytest.raises(ResourceError, match="closed while a program ran"):
                call.result()
    assert _left_over() == []


def test_a_sandbox_that_cannot_be_built_is_an_exception_with_its_reason(sandbox, monkeypatch):
    broken = LocalSandbox(limits=sandbox.limits)
    for command, reason in [
        (["bwrap", "--ro-bind", "/nowhere", "/nowhere", "true"], "/nowhere"),
        (["/usr/bin/false"], "no answer"),
        (["/nowhere/bwrap"], "cannot be started"),
    ]:
        monkeypatch.setattr(type(broken.isolation), "command", lambda *_, command=command, **__: command)
        with pytest.raises(ResourceError, match=reason):
            broken.run("print(1)")


def test_a_sandbox_that_does_not_start_in_time_is_an_exception(sandbox, monkeypatch):
    monkeypatch.setattr(local, "_START_S", 0.2)
    monkeypatch.setattr(type(sandbox.isolation), "command", lambda *_, **__: ["/usr/bin/sleep", "60"])
    with pytest.raises(ResourceError, match=r"no answer within 0\.2 s"):
        sandbox.run("print(1)")
    assert _left_over() == []


def test_one_that_is_killed_while_it_starts_leaves_no_process(sandbox, monkeypatch):
    """Between being forked and being known, the first process of a namespace waits for the command that made it."""
    sessions, start = [], local.subprocess.Popen

    def remembered(*args, **kwargs):
        sessions.append(start(*args, **kwargs))
        return sessions[-1]

    monkeypatch.setattr(local.subprocess, "Popen", remembered)
    for milliseconds in range(1, 41):
        monkeypatch.setattr(local, "_START_S", milliseconds / 1000)
        with suppress(ResourceError):
            sandbox.run("print(1)")
    assert len(sessions) == 40
    monkeypatch.undo()
    known = {process.pid for process in sessions}
    deadline = time.monotonic() + 10
    while left := [
        p for p in psutil.process_iter(["status"]) if _session(p.pid) in known and p.info["status"] != psutil.STATUS_ZOMBIE
    ]:
        assert time.monotonic() < deadline, left  # a signal takes a moment; dead ones wait for init
        time.sleep(0.05)


def _session(pid):
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return None


def test_hundreds_of_programs_leave_nothing_behind(sandbox):
    sandbox.run("print(1)")
    with ThreadPoolExecutor(sandbox.max_concurrent) as threads:
        list(threads.map(lambda i: sandbox.run("pass"), range(50)))  # what threads and allocators keep is kept by now
        before = _used()
        program = f"print(input())\nopen('lockstep-sandbox-{os.getpid()}', 'w').write('x')"
        results = list(threads.map(lambda i: sandbox.run(program, str(i)), range(300)))
        after = _used()
    assert [result.stdout for result in results] == [f"{i}\n" for i in range(300)]
    assert {result.status for result in results} == {"ok"}
    assert _left_over() == []
    assert after["files"] <= before["files"]  # others in this process may have closed some meanwhile
    assert after["mounts"] <= before["mounts"]
    assert set(after["temporary"]) <= set(before["temporary"])
    assert after["rss"] - before["rss"] < 20e6


def _used():
    return {
        "files": len(os.listdir("/proc/self/fd")),
        "mounts": len(Path("/proc/self/mounts").read_text().splitlines()),
        "temporary": sorted(name for name in os.listdir("/tmp") if name.startswith("lockstep-sandbox-")),
        "rss": psutil.Process().memory_info().rss,
    }


def _left_over():
    """Sandbox processes that live, or are dead and not reaped."""
    assert threading.active_count() < 50
    names = ("bwrap", "setpriv", Path(find_isolation(accept_weak=True).interpreter).name)
    return [process.name() for process in psutil.Process().children(recursive=True) if process.name() in names]


# -- weak isolation --------------------------------------------------------------------------------------------------------


@pytest.fixture
def weak(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with LocalSandbox(2, ProgramLimits(wall_s=2.0, memory_mb=256, output_bytes=1000), accept_weak_isolation=True) as made:
        assert made.isolation.is_weak
        yield made


def test_weak_isolation_still_limits_time_memory_output_and_environment(weak, monkeypatch):
    monkeypatch.setenv("LOCKSTEP_SECRET", "1")
    assert weak.run("print(int(input()) + 1)", "41").stdout == "42\n"
    assert weak.run("while True: pass", wall_s=0.3).status == "timeout"
    assert weak.run("x = []\nwhile True: x.append(bytearray(10**6))").status == "memory"
    assert weak.run("while True: print('x' * 100)").status == "output"
    assert "LOCKSTEP" not in weak.run("import os; print(os.environ)").stdout
    many = "import os, time\nfor i in range(12):\n    if os.fork() == 0:\n        x = b'1' * (50 * 10**6); time.sleep(60)\ntime.sleep(60)"
    assert weak.run(many, wall_s=20).status == "memory"
    assert weak.run("import os, time\nfor i in range(70):\n    if os.fork() == 0: time.sleep(60)\ntime.sleep(60)").status in (
        "processes",
        "memory",
    )


def test_weak_isolation_has_a_scratch_folder_that_is_removed_and_kills_the_group(weak):
    where = weak.run(
        "import os\nopen('x', 'w').write('x')\nif os.fork() == 0:\n    import time; time.sleep(86397)\nprint(os.getcwd())"
    ).stdout.strip()
    assert Path(where).name.startswith("lockstep-sandbox-")
    assert not Path(where).exists()
    assert _left_over() == []
