from types import SimpleNamespace

import pytest

from lockstep.observability import eta as eta_module
from lockstep.observability.eta import Eta


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """clock[0] is the time."""
    now = [1000.0]
    monkeypatch.setattr(eta_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


def test_nothing_is_known_before_the_first_step(clock: list[float]) -> None:
    eta = Eta(100)
    assert eta.seconds() is None
    assert str(eta) == "-"


@pytest.mark.parametrize("first_step", [0, 40])
def test_after_five_steps_the_rest_is_known_within_a_quarter(clock: list[float], first_step: int) -> None:
    """A first step that compiles, a validation before the first step, every 10 steps and after the last, a save every 20."""

    def takes(step: int) -> dict[str, float]:
        seconds = {"step": 300.0 if step == first_step + 1 else 10.0 + (step % 3)}
        seconds |= {"testing": 80.0} if step % 10 == 0 else {}
        return seconds | ({"save_checkpoint": 5.0} if step % 20 == 0 else {})

    total = 100
    clock[0] += 7  # loading the checkpoint, or whatever
    eta = Eta(total, first_step, due={"testing": lambda step: step % 10 == 0, "save_checkpoint": lambda step: step % 20 == 0})
    clock[0] += 80
    eta.step(first_step, {"timing_s/testing": 80.0}, is_step=False)
    for step in range(first_step + 1, first_step + 6):
        clock[0] += sum(takes(step).values()) + 0.5  # between steps
        eta.step(step, {f"timing_s/{name}": value for name, value in takes(step).items()})
    truth = sum(sum(takes(step).values()) + 0.5 for step in range(first_step + 6, total + 1))
    found = eta.seconds()
    assert found is not None
    assert abs(found - truth) < truth / 10
    clock[0] += 4
    assert eta.seconds() == pytest.approx(found - 4)


def test_the_pace_is_that_of_the_last_steps(clock: list[float]) -> None:
    eta = Eta(1000)
    for step in range(1, 101):
        clock[0] += 1.0 if step <= 50 else 9.0
        eta.step(step, {})
    assert eta.seconds() == pytest.approx(900 * 9)
    assert str(eta) == "2:15:00"


def test_numbers_that_are_no_times_show_as_unknown(clock: list[float]) -> None:
    eta = Eta(10, due={"testing": lambda step: True})
    eta.step(1, {"timing_s/testing": float("inf")})
    assert str(eta) == "-"
