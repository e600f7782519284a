import asyncio
import contextlib
import functools
import gc
import itertools
import os
import subprocess
import sys
import threading
import time

import psutil
import pytest
from helpers.rewards import behave, nap, truth, works_at_last

from lockstep.rewards import runner
from lockstep.rewards.outcome import Failure, Score
from lockstep.rewards.runner import EventLoop, RewardRunner


async def async_truth(ground_truth):
    await asyncio.sleep(0.001 * (10 - ground_truth))  # the first row ends last
    return ground_truth


class AsyncTruth:
    async def __call__(self, ground_truth):
        return ground_truth


@pytest.fixture
def pool():
    pool = RewardRunner(num_workers=2, timeout_s=5.0)
    yield pool
    pool.close()


@pytest.mark.parametrize(
    "function",
    [truth, lambda ground_truth: ground_truth, async_truth, AsyncTruth(), functools.partial(async_truth)],
    ids=["process", "thread", "async", "object", "partial"],
)
def test_every_kind_of_function_scores(pool, function):
    futures = [pool.submit(function, {"ground_truth": i}) for i in range(10)]
    assert [future.result(10) for future in futures] == [Score(float(i)) for i in range(10)]


async def async_nap(seconds):
    await asyncio.sleep(seconds)
    return 1.0


@pytest.mark.parametrize("function", [nap, lambda seconds: nap(seconds), async_nap], ids=["process", "thread", "async"])
def test_an_outcome_says_how_long_its_own_call_took(pool, function):
    # One after the other on two workers: neither the wait for a place nor the start of a process is part of it.
    began = time.monotonic()
    outcomes = [future.result(20) for future in [pool.submit(function, {"seconds": 0.1}) for _ in range(6)]]
    elapsed = time.monotonic() - began
    assert all(0.1 <= outcome.seconds <= elapsed for outcome in outcomes)
    if function is not async_nap:
        assert sum(outcome.seconds for outcome in outcomes) <= 2 * elapsed


async def async_works_at_last(counter, at, how):
    if how == "hang" and len(counter.read_text().splitlines() if counter.exists() else []) < at:
        with counter.open("a") as file:
            file.write("0\n")
        await asyncio.sleep(3600)
    return works_at_last(counter, at, how)


@pytest.mark.parametrize(
    ("function", "how"),
    [
        (works_at_last, "raise"),
        (works_at_last, "hang"),
        (works_at_last, "die"),
        (lambda **row: works_at_last(**row), "raise"),
        (async_works_at_last, "raise"),
        (async_works_at_last, "hang"),
    ],
    ids=["process", "process-hangs", "process-dies", "thread", "async", "async-hangs"],
)
def test_a_call_that_fails_is_made_again_as_often_as_the_pool_says(function, how, tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "_FIRST_WAIT_S", 0.05)
    pool = RewardRunner(2, timeout_s=1.0, retries=2)
    try:
        found = [pool.submit(function, {"counter": tmp_path / str(at), "at": at, "how": how}).result(60) for at in range(4)]
    finally:
        pool.close()
    assert found[:3] == [Score(0.0), Score(1.0), Score(2.0)]
    assert [outcome.num_retries for outcome in found] == [0, 1, 2, 2]
    assert found[3].kind == {"raise": "raised", "hang": "timeout", "die": "crashed"}[how]
    assert len((tmp_path / "3").read_text().splitlines()) == 3


def test_the_waits_between_two_calls_grow_and_hold_no_other_call_up(tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "_FIRST_WAIT_S", 0.4)
    monkeypatch.setattr(runner, "_LONGEST_WAIT_S", 0.7)
    pool = RewardRunner(1, timeout_s=30.0, retries=3)
    try:
        pool.submit(truth, {"ground_truth": 1}).result(30)  # the process is there
        late = pool.submit(works_at_last, {"counter": tmp_path / "late", "at": 3, "how": "raise"})
        between = [pool.submit(truth, {"ground_truth": i}) for i in range(5)]
        assert [future.result(30) for future in between] == [Score(float(i)) for i in range(5)]
        assert not late.done()
        assert late.result(30) == Score(3.0)
    finally:
        pool.close()
    times = [float(line) for line in (tmp_path / "late").read_text().splitlines()]
    first, second, third = (later - earlier for earlier, later in itertools.pairwise(times))
    assert first >= 0.4
    assert second >= 0.7
    assert third >= 0.7


def test_what_a_function_returned_is_its_answer_and_it_is_not_asked_again(tmp_path):
    pool = RewardRunner(1, timeout_s=30.0, retries=3)
    try:
        found = pool.submit(works_at_last, {"counter": tmp_path / "n", "at": 1, "how": "none"}).result(30)
    finally:
        pool.close()
    assert (found.kind, found.num_retries) == ("invalid", 0)


def test_a_row_that_hangs_dies_or_raises_is_a_failure_of_its_own_and_delays_no_other():
    pool = RewardRunner(num_workers=2, timeout_s=2.0)
    rows = ["raise", 1, "hang", 2, "exit", 3, "die", 4, "backtrack", 5, "nan", 6, 7, 8]
    started = time.monotonic()
    outcomes = [future.result(60) for future in [pool.submit(behave, {"ground_truth": row}) for row in rows]]
    assert time.monotonic() - started < 60
    kinds = {"raise": "raised", "hang": "timeout", "exit": "raised", "die": "crashed", "backtrack": "timeout", "nan": "invalid"}
    for row, outcome in zip(rows, outcomes, strict=True):
        if row in kinds:
            assert isinstance(outcome, Failure)
            assert outcome.kind == kinds[row], outcome
        else:
            assert isinstance(outcome, Score)
            assert (outcome.value, outcome.extra["pid"] != os.getpid()) == (row, True)
    assert 'raise KeyError("my own mistake")' in outcomes[0].text
    pool.close()


@pytest.mark.parametrize("is_async", [False, True])
def test_a_call_that_cannot_be_killed_is_given_up_at_its_deadline(is_async):
    pool, release = RewardRunner(1, timeout_s=1.0), threading.Event()

    def hangs(ground_truth):
        if ground_truth == 0:
            release.wait()
        return 1.0

    async def async_hangs(ground_truth):
        if ground_truth == 0:
            await asyncio.sleep(3600)
        return 1.0

    futures = [pool.submit(async_hangs if is_async else hangs, {"ground_truth": i}) for i in range(3)]
    outcomes = [future.result(30) for future in futures]
    assert outcomes[0].kind == "timeout"
    assert outcomes[1:] == [Score(1.0), Score(1.0)]
    release.set()
    pool.close()


def test_an_async_call_that_catches_its_cancellation_is_given_up_too():
    async def tries_again(ground_truth):
        while True:
            with contextlib.suppress(BaseException):
                await asyncio.sleep(3600)

    pool = RewardRunner(1, timeout_s=0.1)
    assert pool.submit(tries_again, {"ground_truth": 0}).result(5).kind == "timeout"
    pool.close()


_TRIES_AGAIN = """
import asyncio, contextlib, gc, time
from lockstep.rewards.runner import RewardRunner

async def tries_again(waits):
    while True:
        with contextlib.suppress(BaseException):
            await (asyncio.sleep(3600) if waits == "timer" else asyncio.Event().wait())

pool = RewardRunner(1, timeout_s=0.1)
print([pool.submit(tries_again, {"waits": waits}).result(5).kind for waits in ("timer", "event")])
pool.submit(tries_again, {"waits": "event"})
pool.close()
del pool

async def answers(waits):
    await asyncio.sleep(0.02)
    return 1

pool = RewardRunner(1, timeout_s=0.1)
calls = [pool.submit(answers, {"waits": 0}) for _ in range(64)] + [pool.submit(tries_again, {"waits": "event"})]  # which waits its turn
del pool
gc.collect()
print(calls[-1].result(5).kind)
time.sleep(0.3)
for _ in range(3):
    gc.collect()
print("collected")
"""


def test_a_call_that_catches_its_end_is_never_collected_in_a_thread_of_ours():
    # Collected, it would be told to end and try again for ever, in the thread that collects it. In a process, which can be killed.
    ended = subprocess.run([sys.executable, "-c", _TRIES_AGAIN], capture_output=True, text=True, timeout=240)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.splitlines() == ["['timeout', 'timeout']", "timeout", "collected"]


def test_closing_ends_the_event_loops():
    async def waits(ground_truth):
        await asyncio.sleep(3600)

    def loops():
        return {thread for thread in threading.enumerate() if thread.name.startswith("reward-loop")}

    before = loops()
    pool = RewardRunner(1, timeout_s=1.0)
    assert pool.submit(async_truth, {"ground_truth": 10}).result(5) == Score(10.0)
    late = pool.submit(waits, {"ground_truth": 0})
    own = loops() - before
    assert own
    pool.close()
    assert late.result(10).kind == "timeout"  # what was asked before is answered
    for thread in own:
        thread.join(10)
    assert not own & loops()


def test_a_loop_that_is_blocked_again_answers_again(monkeypatch):
    """The second block was answered by nobody, and the run waited for ever."""
    monkeypatch.setattr(runner, "_LOOP_PATIENCE_S", 0.5)
    loop, releases = EventLoop(0.2), [threading.Event(), threading.Event()]

    async def blocks(release):
        release.wait()

    for release in releases:
        calls = [loop.submit(blocks, {"release": release}), loop.submit(async_truth, {"ground_truth": 9})]
        assert {call.result(10).kind for call in calls} == {"timeout"}
        release.set()
        while loop.submit(async_truth, {"ground_truth": 9}).result(10) != Score(9.0):  # until the loop turns again
            time.sleep(0.05)
    loop.close()


@pytest.mark.parametrize("error", [TimeoutError, asyncio.CancelledError])
def test_what_an_async_call_raises_itself_is_no_deadline_of_ours(pool, error):
    async def raises(ground_truth):
        raise error("a server of mine")

    failure = pool.submit(raises, {"ground_truth": 0}).result(5)
    assert failure.kind == "raised"
    assert "a server of mine" in failure.text


def test_an_async_function_that_blocks_its_loop_is_given_up_and_later_rows_get_a_new_loop():
    pool, release = RewardRunner(1, timeout_s=1.0), threading.Event()

    async def blocks(ground_truth):
        if ground_truth == 0:
            release.wait()
        return 1.0

    first = [pool.submit(blocks, {"ground_truth": i}) for i in range(2)]
    assert [future.result(30).kind for future in first] == ["timeout", "timeout"]
    assert "must await" in first[1].result().text
    assert pool.submit(blocks, {"ground_truth": 1}).result(5) == Score(1.0)
    release.set()
    pool.close()


def test_async_calls_overlap_but_never_more_than_64(pool):
    running, most = 0, 0

    async def count():
        nonlocal running, most
        running += 1
        most = max(most, running)
        while most < 64:  # until so many overlap, however slowly they are submitted
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.05)  # time for more to begin, were they let
        running -= 1
        return 0

    for future in [pool.submit(count, {}) for _ in range(200)]:
        future.result(10)
    assert most == 64


@pytest.mark.parametrize("retries", [0, 2])
def test_a_pool_that_nobody_has_any_more_ends_its_threads_and_processes(retries):
    """A test of 50 managers had left 92 threads."""
    before = set(threading.enumerate())
    pool = RewardRunner(2, 60.0, retries=retries)
    release = threading.Event()

    async def waits(ground_truth):
        while not release.is_set():
            await asyncio.sleep(0.01)
        return ground_truth

    in_thread = pool.submit(lambda ground_truth: release.wait(60) and ground_truth, {"ground_truth": 1})
    in_loop = pool.submit(waits, {"ground_truth": 2})
    pid = pool.submit(behave, {"ground_truth": 1}).result(10).extra["pid"]
    own = {thread for thread in threading.enumerate() if thread.name.startswith(("scoring", "reward-loop"))} - before
    assert len(own) == 4
    del pool
    gc.collect()
    release.set()
    assert (in_thread.result(30), in_loop.result(30)) == (Score(1.0), Score(2.0))  # what was asked before is answered
    for thread in own:
        thread.join(5)
    assert not any(thread.is_alive() for thread in own)
    assert not psutil.pid_exists(pid)


def test_a_thread_that_cannot_start_leaves_no_later_call_without_an_answer(pool, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", raises_no_thread)
        for _ in range(2):  # as many as the pool has threads
            with pytest.raises(RuntimeError):
                pool.submit(lambda ground_truth: ground_truth, {"ground_truth": 1})
    for _ in range(2):
        assert pool.submit(lambda ground_truth: ground_truth, {"ground_truth": 1}).result(10) == Score(1.0)


def raises_no_thread(thread):
    raise RuntimeError("can't start new thread")


def test_closing_ends_the_processes():
    pool = RewardRunner(2, 5.0)
    pids = {future.result(10).extra["pid"] for future in [pool.submit(behave, {"ground_truth": 1}) for _ in range(8)]}
    pool.close()
    deadline = time.monotonic() + 5
    while any(psutil.pid_exists(pid) for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.02)
