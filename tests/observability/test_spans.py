from types import SimpleNamespace

import pytest

from lockstep.observability import spans
from lockstep.observability.spans import StageTimer


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """clock[0] is the time."""
    now = [100.0]
    monkeypatch.setattr(spans, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    return now


def test_stages_add_up_when_entered_again_and_nest(clock: list[float]) -> None:
    timer = StageTimer()
    with timer.stage("step"):
        for seconds in (1.0, 2.0):
            with timer.stage("gen"):
                clock[0] += seconds
        clock[0] += 4.0
    assert timer.seconds == {"gen": 3.0, "step": 7.0}


def test_a_stage_that_raises_still_records_its_time(clock: list[float]) -> None:
    timer = StageTimer()

    def stage_that_fails() -> None:
        with timer.stage("gen"):
            clock[0] += 2.0
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        stage_that_fails()
    assert timer.seconds == {"gen": 2.0}
    with timer.stage("gen"):
        clock[0] += 1.0
    assert timer.seconds == {"gen": 3.0}


def test_a_stage_inside_itself_is_an_error_and_the_outer_one_goes_on(clock: list[float]) -> None:
    timer = StageTimer()
    with timer.stage("gen"):
        with pytest.raises(RuntimeError, match="'gen' is already open"), timer.stage("gen"):
            pass
        clock[0] += 1.0
    assert timer.seconds == {"gen": 1.0}


def test_reset_forgets(clock: list[float]) -> None:
    timer = StageTimer()
    with timer.stage("gen"):
        clock[0] += 1.0
    last_step = timer.seconds
    timer.reset()
    assert timer.seconds == {}
    assert last_step == {"gen": 1.0}, "a step's times stay with whoever took them"
