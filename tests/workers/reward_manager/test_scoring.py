from __future__ import annotations

import asyncio
import functools
import pickle
import threading
import time

import numpy as np
import pytest
import torch

from lockstep.errors import RewardError
from lockstep.workers.reward_manager.scoring import ScoringRow, score_rows


def make_rows(count: int) -> list[ScoringRow]:
    return [
        ScoringRow(data_source="a/b", solution_str=f"response {i} " + "x" * 500, ground_truth=i, extra_info={"i": i})
        for i in range(count)
    ]


def truth(data_source, solution_str, ground_truth, extra_info):
    return ground_truth


async def async_truth(data_source, solution_str, ground_truth, extra_info):
    await asyncio.sleep(0.001 * (10 - ground_truth))  # the first row ends last
    return ground_truth


class AsyncTruth:
    async def __call__(self, data_source, solution_str, ground_truth, extra_info):
        return ground_truth


@pytest.mark.parametrize(
    "compute_score",
    [truth, async_truth, AsyncTruth(), functools.partial(async_truth)],
    ids=["sync", "async", "object", "partial"],
)
def test_scores_are_in_the_order_of_the_rows(compute_score):
    assert [s.value for s in score_rows(compute_score, make_rows(10), 10.0)] == list(range(10))


def test_a_sync_function_may_run_an_event_loop_of_its_own():
    def runs_a_loop(**row):
        return asyncio.run(async_truth(**row))

    assert score_rows(runs_a_loop, make_rows(1), 10.0)[0].value == 0


def test_async_calls_overlap_but_never_more_than_64():
    running, most = 0, 0

    async def count(**row):
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.001)
        running -= 1
        return 0

    score_rows(count, make_rows(200), 10.0)
    assert most == 64


@pytest.mark.parametrize("is_async", [False, True])
def test_a_function_that_raises_is_reported_with_row_source_response_and_its_traceback(is_async):
    def fails(data_source, solution_str, ground_truth, extra_info):
        if ground_truth == 2:
            raise KeyError("my own mistake")
        return 1.0

    async def async_fails(**row):
        return fails(**row)

    with pytest.raises(RewardError) as caught:
        score_rows(async_fails if is_async else fails, make_rows(4), 10.0)
    message = str(caught.value)
    assert "row 2, data_source 'a/b'" in message
    assert "response 2 x" in message
    assert "x" * 201 not in message
    assert 'raise KeyError("my own mistake")' in message
    assert isinstance(pickle.loads(pickle.dumps(caught.value)), RewardError)


def test_a_function_that_exits_or_takes_other_arguments_is_an_error_not_an_exit():
    with pytest.raises(RewardError, match="SystemExit"):
        score_rows(lambda **row: exit(3), make_rows(1), 10.0)
    with pytest.raises(RewardError, match="unexpected keyword argument"):
        score_rows(lambda solution_str: 1.0, make_rows(1), 10.0)


@pytest.mark.parametrize(
    "result",
    [
        None,
        "1.0",
        float("nan"),
        float("inf"),
        -float("inf"),
        1e39,
        10**400,
        1j,
        [1.0],
        {},
        {"acc": 1},
        {"score": None},
        torch.ones(2),
    ],
    ids=repr,
)
def test_a_result_that_is_not_a_finite_number_is_an_error_that_names_the_row(result):
    with pytest.raises(RewardError, match=r"returned .* on row 0"):
        score_rows(lambda **row: result, make_rows(1), 10.0)


@pytest.mark.parametrize(
    "result", [1, True, 1.0, np.float32(1), np.int64(1), np.bool_(True), torch.tensor(1.0), torch.ones(1)], ids=repr
)
def test_every_kind_of_number_is_a_score(result):
    score = score_rows(lambda **row: {"score": result, "note": "n"}, make_rows(1), 10.0)[0]
    assert (type(score.value), score.value, score.extra) == (float, 1.0, {"note": "n"})


@pytest.mark.parametrize("is_async", [False, True])
def test_a_function_that_hangs_ends_at_the_deadline_with_the_unfinished_rows(is_async):
    release = threading.Event()

    def hangs(ground_truth, **row):
        if ground_truth == 2:
            release.wait()
        return 0.0

    async def async_hangs(ground_truth, **row):
        if ground_truth == 2:
            await asyncio.sleep(3600)
        return 0.0

    start = time.perf_counter()
    with pytest.raises(RewardError, match=r"0\.2 s; .* not finished: " + ("2$" if is_async else "2, 3$")):
        score_rows(async_hangs if is_async else hangs, make_rows(4), 0.2)
    assert time.perf_counter() - start < 5
    release.set()


def test_no_row_is_started_after_the_deadline():
    release, started = threading.Event(), []

    def hangs(ground_truth, **row):
        started.append(ground_truth)
        release.wait()
        return 0.0

    before = set(threading.enumerate())
    with pytest.raises(RewardError):
        score_rows(hangs, make_rows(4), 0.1)
    (thread,) = set(threading.enumerate()) - before
    assert thread.daemon
    release.set()
    thread.join(timeout=5)
    assert not thread.is_alive()
    assert started == [0]


def test_async_calls_are_cancelled_at_the_deadline():
    cancelled = threading.Event()

    async def hangs(**row):
        try:
            await asyncio.sleep(3600)
        finally:
            cancelled.set()

    with pytest.raises(RewardError, match="not finished: 0"):
        score_rows(hangs, make_rows(1), 0.1)
    assert cancelled.wait(timeout=5)
