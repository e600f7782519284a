"""Call a user's reward function on every row under one deadline, and accept nothing but numbers from it."""

from __future__ import annotations

import asyncio
import inspect
import threading
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from lockstep.errors import RewardError

ComputeScore = Callable[..., Any]
"""(data_source=, solution_str=, ground_truth=, extra_info=) -> a number, or a dict with "score"; sync or async."""

_MAX_CONCURRENT = 64
_MAX_FLOAT32 = float(torch.finfo(torch.float32).max)
_NUM_SHOWN = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoringRow:
    """What a reward function is told about one response."""

    data_source: Any
    solution_str: str
    ground_truth: Any
    extra_info: Any


@dataclass(frozen=True, slots=True)
class Score:
    """A finite number, and what else the function returned."""

    value: float
    extra: dict[str, Any]


def score_rows(compute_score: ComputeScore, rows: Sequence[ScoringRow], timeout_s: float) -> list[Score]:
    """The score of every row, in order.

    A sync function is called row after row; of an async one at most 64 calls are open at a time, in one event loop.
    Either runs on a thread of its own (so not where signal handlers can be set). At the deadline async calls are
    cancelled; a sync call that hangs is left behind: no further row is started on its thread, and being a daemon the
    thread does not keep the process alive.

    Raises RewardError when a call raises, returns something that is not a finite number, or `timeout_s` pass before
    the last one ends.
    """
    scores: list[Score | None] = [None] * len(rows)
    stop = threading.Event()
    finished: Future[None] = Future()

    def work() -> None:
        try:
            if _is_async(compute_score):
                asyncio.run(_score_concurrently(compute_score, rows, scores, timeout_s))
            else:
                _score_in_turn(compute_score, rows, scores, stop)
            finished.set_result(None)
        except BaseException as error:
            finished.set_exception(error)

    threading.Thread(target=work, name="reward", daemon=True).start()
    try:
        finished.result(timeout=timeout_s)
    except TimeoutError as error:
        pending = [i for i, score in enumerate(scores) if score is None]
        raise RewardError(
            f"scoring did not end within {timeout_s:g} s; {len(pending)} of {len(rows)} rows are not finished: {_shorten(pending)}"
        ) from error
    finally:
        stop.set()
    return [score for score in scores if score is not None]


def _score_in_turn(
    compute_score: ComputeScore, rows: Sequence[ScoringRow], scores: list[Score | None], stop: threading.Event
) -> None:
    for i, row in enumerate(rows):
        if stop.is_set():
            return
        try:
            result = compute_score(**_arguments(row))
        except (Exception, SystemExit) as error:
            raise _raised(error, row, i) from error
        scores[i] = _checked(result, row, i)


async def _score_concurrently(
    compute_score: ComputeScore, rows: Sequence[ScoringRow], scores: list[Score | None], timeout_s: float
) -> None:
    limit = asyncio.Semaphore(_MAX_CONCURRENT)

    async def score_one(i: int, row: ScoringRow) -> None:
        async with limit:
            try:
                result = await compute_score(**_arguments(row))
            except (Exception, SystemExit) as error:
                raise _raised(error, row, i) from error
            scores[i] = _checked(result, row, i)

    # Also a deadline here, so that open calls are cancelled; its TimeoutError is the caller's too.
    await asyncio.wait_for(asyncio.gather(*(score_one(i, row) for i, row in enumerate(rows))), timeout_s)


def _arguments(row: ScoringRow) -> dict[str, Any]:
    return {name: getattr(row, name) for name in ("data_source", "solution_str", "ground_truth", "extra_info")}


def _is_async(function: ComputeScore) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


def _raised(error: BaseException, row: ScoringRow, index: int) -> RewardError:
    # The first frame is ours; where it is the only one, the call itself failed and the message says why.
    tail = error.__traceback__.tb_next if error.__traceback__ is not None else None
    text = "".join(traceback.format_exception(type(error), error, tail))
    return RewardError(f"the reward function raised on {_where(row, index)}\n{text}")


def _checked(result: Any, row: ScoringRow, index: int) -> Score:
    extra = {}
    value = result
    if isinstance(result, dict):
        if "score" not in result:
            raise RewardError(f"the reward function returned a dict without 'score' ({result!r}) on {_where(row, index)}")
        extra = {name: v for name, v in result.items() if name != "score"}
        value = result["score"]
    if isinstance(value, np.generic) or (isinstance(value, torch.Tensor) and value.numel() == 1):
        value = value.item()
    # The reward tensor is float32, where a larger number would become infinite.
    if not (isinstance(value, int | float) and -_MAX_FLOAT32 <= value <= _MAX_FLOAT32):
        raise RewardError(f"the reward function returned {value!r}, which is not a finite number, on {_where(row, index)}")
    return Score(float(value), extra)


def _where(row: ScoringRow, index: int) -> str:
    return f"row {index}, data_source {row.data_source!r}; the response begins: {row.solution_str[:_NUM_SHOWN]!r}"


def _shorten(rows: list[int]) -> str:
    shown = ", ".join(map(str, rows[:20]))
    return shown if len(rows) <= 20 else f"{shown}, ..."
