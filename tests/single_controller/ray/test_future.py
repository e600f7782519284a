"""Waiting for answers, with a module of the test in Ray's place: what is late, and what is interrupted."""

from types import SimpleNamespace

import pytest

from lockstep.errors import WorkerError, WorkerTimeout
from lockstep.single_controller.ray import future
from lockstep.single_controller.ray.future import RayFuture


class RayError(Exception):
    pass


class Interrupt(BaseException):
    """In KeyboardInterrupt's place, which would end the tests where it is not expected."""


class FakeRay:
    """References are the answers themselves; those in `ready` can be had. An exception among `interrupts` comes at the next `get`."""

    exceptions = SimpleNamespace(RayTaskError=RayError, RayError=RayError)

    def __init__(self):
        self.ready, self.interrupts = [], []

    def wait(self, refs, num_returns, timeout):
        there = [ref for ref in refs if ref in self.ready][:num_returns]
        return there, [ref for ref in refs if ref not in there]

    def get(self, ref):
        if self.interrupts:
            raise self.interrupts.pop()
        if isinstance(ref, Exception):
            raise ref
        return ref


@pytest.fixture
def ray(monkeypatch):
    fake = FakeRay()
    monkeypatch.setattr(future, "import_ray", lambda: fake)
    return fake


def answers_of(refs, fail=lambda error: error, timeout_s=0.0):
    return RayFuture(refs, ["rank 0", "rank 1"], "task", timeout_s, 60.0, list, fail)


def test_answers_that_are_there_are_taken_however_late_they_are_asked_for(ray):
    """The deadline has passed before anybody looks: with one answer of two that is a failure, with both it is none."""
    ray.ready = ["a", "b"]
    assert answers_of(["a", "b"]).get() == ["a", "b"]
    ray.ready = ["a"]
    with pytest.raises(WorkerTimeout, match="rank 1"):
        answers_of(["a", "b"]).get()


def test_an_answer_whose_fetching_was_interrupted_can_be_had_later(ray):
    ray.ready, ray.interrupts = ["a", "b"], [Interrupt()]
    waiting = answers_of(["a", "b"])
    with pytest.raises(Interrupt):
        waiting.get()
    assert waiting.get() == ["a", "b"]


def test_a_failure_whose_handling_was_interrupted_is_raised_later(ray):
    def fail(error):
        raise Interrupt

    failure = RayError("broken")
    ray.ready = ["a", failure]
    waiting = answers_of(["a", failure], fail)
    with pytest.raises(Interrupt):
        waiting.get()
    with pytest.raises(WorkerError, match="broken"):
        waiting.get()
