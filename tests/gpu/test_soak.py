"""The soak's driver, with both engines on the CPU; on a GPU it is a command (gpu/soak.py)."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from gpu import soak
from gpu.soak_cases import Case, draw_case
from gpu.soak_play import Played, compare, engine_for, expected, neighbours, plain_for, play


def played_case(wants: Any) -> tuple[Case, list[Played], Any]:
    """The first case of that kind, played on the CPU, and the plain engine."""
    case = next(case for case in map(draw_case, range(10_000)) if wants(case) and not case.settings.batch_invariant)
    return case, play(engine_for(case, "cpu"), case), plain_for(case)


def test_cases_on_the_cpu_are_equal() -> None:
    outcomes = soak.soak(range(14, 20), seconds=300.0, device="cpu")
    assert [outcome.error for outcome in outcomes] == [None] * 6
    found = soak.summary(outcomes)
    assert found["all"]["cases"] == 6
    assert found["stream"]["cases"] > 0
    assert found["list"]["cases"] > 0
    assert found["all"]["wrong"] == 0
    assert found["all"]["equal"] > 6


def test_adapters_change_what_is_drawn() -> None:
    case = next(case for case in map(draw_case, range(10_000)) if case.adapters and not case.is_open and case.params.temperature)
    assert soak.soak([case.params.seed], 300.0, "cpu")[0].verdicts["wrong"] == 0
    without = dataclasses.replace(case, adapters=False)
    with_ids, without_ids = ([p.completion.ids.tolist() for p in play(engine_for(c, "cpu"), c)] for c in (case, without))
    assert with_ids != without_ids


def test_two_processes_find_what_one_finds() -> None:
    assert soak.soak([0, 1], 300.0, "cpu", processes=2) == soak.soak([0, 1], 300.0, "cpu")


def test_every_family_has_a_process_and_the_last_ones_have_more() -> None:
    assert soak._shares(14, 5) == [2, 3, 3, 3, 3]
    assert soak._shares(2, 5) == [1, 1, 1, 1, 1]


def test_the_time_limit_ends_it() -> None:
    assert soak.soak(range(5), seconds=-1.0, device="cpu") == []


def test_a_case_that_raises_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak, "play", lambda engine, case: 1 / 0)
    outcome = soak.soak([0], 300.0, "cpu")[0]
    assert outcome.is_wrong
    assert outcome.error is not None
    assert "ZeroDivisionError" in outcome.error


def test_streams_are_continued_and_aborted() -> None:
    case, played, plain = played_case(lambda case: case.is_open and case.room is None and len(case.arrivals) > 30)
    continued = [p for p in played if p.request.position]
    assert continued
    assert all(len(p.request.prompt_ids) > p.own for p in continued)
    assert any(p.completion.finish_reason == "abort" for p in played)
    assert compare(case, played, expected(plain, case, played), plain)["wrong"] == 0


def test_a_small_cache_is_small() -> None:
    case = next(c for c in map(draw_case, range(10_000)) if c.room == 320 and not c.is_open and len(c.arrivals) > 30)
    engine = engine_for(case, "cpu")
    scheduler = engine._scheduler_for([arrival.request for arrival in case.arrivals], case.params)
    assert scheduler.pool.num_pages == 1 + 320 // engine.backend.page_size


@pytest.mark.parametrize("change", ["token", "log_prob", "reason", "random numbers", "top", "prompt", "pieces"])
def test_what_differs_is_wrong(change: str) -> None:
    case, played, plain = played_case(lambda case: case.is_open and case.room is None and len(case.arrivals) > 30)
    answers = expected(plain, case, played)

    def wants(p: Played) -> bool:
        asked: dict[str, Any] = {"top": p.request.top_log_probs, "pieces": p.request.streams}
        asked["prompt"] = p.request.prompt_log_probs and p.own > 1
        asked["random numbers"] = p.request.position and (p.request.sampling or case.params).temperature
        return len(p.completion.ids) > 1 and bool(asked.get(change, True)) and p.completion.finish_reason != "abort"

    place = next(i for i, p in enumerate(played) if wants(p))
    old = played[place]
    changes: dict[str, Any] = {"reason": {"finish_reason": "other"}}
    if change == "token":
        ids = old.completion.ids.clone()
        near = neighbours(case, old.request, ids[:1].tolist(), plain)
        ids[1] = next(token for token in range(31) if token not in near)
        changes["token"] = {"ids": ids}
    elif change == "log_prob":
        changes["log_prob"] = {"log_probs": old.completion.log_probs + 0.01}
    elif change == "top":
        assert old.completion.top_log_probs is not None
        changes["top"] = {"top_log_probs": [[(t, x + 0.01) for t, x in row] for row in old.completion.top_log_probs]}
    elif change == "prompt":
        assert old.completion.prompt_log_probs is not None
        changes["prompt"] = {"prompt_log_probs": old.completion.prompt_log_probs + torch.tensor(0.01)}
    played[place] = dataclasses.replace(old, completion=dataclasses.replace(old.completion, **changes.get(change, {})))
    if change == "pieces":
        played[place].pieces = old.pieces[:-1]
    if change == "random numbers":
        played[place].request = dataclasses.replace(old.request, position=old.request.position + 1)
        answers = expected(plain, case, played)
    assert compare(case, played, answers, plain)["wrong"] >= 1
