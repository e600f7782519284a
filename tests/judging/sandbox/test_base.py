from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from lockstep.errors import ConfigError, ResourceError
from lockstep.judging.sandbox import ProgramLimits, Result, Sandbox
from lockstep.judging.sandbox.base import exit_status


class Recorder(Sandbox):
    """Runs nothing; remembers how many programs were inside at once."""

    def __init__(self, max_concurrent, queue_s=10.0, hold_s=0.01):
        super().__init__(max_concurrent, ProgramLimits(), queue_s)
        self.hold_s, self.inside, self.most, self.stop = hold_s, 0, 0, threading.Event()
        self.count = threading.Lock()

    def _execute(self, program, stdin, wall_s):
        with self.count:
            self.inside += 1
            self.most = max(self.most, self.inside)
        closed = self.stop.wait(self.hold_s)
        with self.count:
            self.inside -= 1
        if closed:
            raise ResourceError("closed")
        return Result(status="ok", exit_code=0, stdout=f"{program}{stdin}{wall_s:g}", stderr="", seconds=0.0)

    def _end_all(self):
        self.stop.set()


def test_at_most_so_many_programs_run_at_once_and_all_are_run():
    sandbox = Recorder(3)
    with ThreadPoolExecutor(12) as threads:
        results = list(threads.map(lambda i: sandbox.run(str(i), "/", 1.0).stdout, range(40)))
    assert results == [f"{i}/1" for i in range(40)]
    assert sandbox.most == 3


def test_it_can_be_awaited():
    sandbox = Recorder(2)

    async def both():
        return await asyncio.gather(sandbox.run_async("a"), sandbox.run_async("b", wall_s=2))

    assert [result.stdout for result in asyncio.run(both())] == ["a10", "b2"]


def test_waiting_for_a_place_has_a_deadline_that_names_the_key():
    sandbox = Recorder(1, queue_s=0.05, hold_s=5.0)
    with ThreadPoolExecutor(1) as threads:
        first = threads.submit(sandbox.run, "slow")
        while not sandbox.inside:
            time.sleep(0.001)
        with pytest.raises(ResourceError, match=r"within 0\.05 s.*reward\.sandbox\.max_concurrent"):
            sandbox.run("late")
        sandbox.close()
        assert isinstance(first.exception(), ResourceError)


def test_closing_ends_what_runs_what_waits_and_what_comes_later():
    sandbox = Recorder(1, hold_s=60.0)
    with ThreadPoolExecutor(3) as threads:
        calls = [threads.submit(sandbox.run, "x") for _ in range(3)]
        while not sandbox.inside:
            time.sleep(0.001)
        sandbox.close()
        for call in calls:
            with pytest.raises(ResourceError, match="closed"):
                call.result(timeout=10)
    with pytest.raises(ResourceError, match="closed"):
        sandbox.run("x")


def test_a_place_is_free_again_after_a_failure():
    sandbox = Recorder(1, queue_s=0.5)
    sandbox.stop.set()
    for _ in range(3):
        with pytest.raises(ResourceError, match="closed"):
            sandbox.run("x")
    sandbox.stop.clear()
    assert sandbox.run("x").status == "ok"


def test_a_sandbox_that_returns_something_else_does_not_pass_its_check():
    with pytest.raises(ResourceError, match="does not run programs"):
        Recorder(1).check()


def test_limits_and_places_must_be_positive():
    with pytest.raises(ConfigError, match="memory_mb"):
        ProgramLimits(memory_mb=0)
    with pytest.raises(ConfigError, match="wall_s"):
        ProgramLimits(wall_s=float("nan"))
    with pytest.raises(ConfigError, match="max_concurrent"):
        Recorder(0)


def test_the_status_follows_from_the_exit_code():
    assert [exit_status(code, "") for code in (0, 1, 128, 137)] == ["ok", "error", "error", "killed"]
    assert exit_status(1, "Traceback ...\nMemoryError: no\n") == "memory"
    assert exit_status(1, "MemoryError\nother") == "error"
