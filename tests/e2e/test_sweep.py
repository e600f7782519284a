"""Random configurations that must be the same whatever is done for speed or safety: the first cases of the sweep (sweep.py)."""

import pytest
from e2e import sweep

from lockstep.config import load_config

COUNT = 40


@pytest.mark.parametrize("part", range(4))
def test_pairs_of_runs_are_equal(embedded_task, part):
    wrong = [(one, why) for one, _, why in sweep.sweep(embedded_task, part * COUNT // 4, COUNT // 4) if why]
    assert wrong == []


def test_the_cases_are_valid_varied_and_the_same_in_every_run():
    cases = [sweep.case(number) for number in range(500)]
    assert cases == [sweep.case(number) for number in range(500)]
    assert {one.change for one in cases[:COUNT]} == set(sweep.CHANGES)
    assert len({one.overrides for one in cases}) > 490
    for one in cases[::25]:
        load_config(["data.train_files=x", "actor_rollout_ref.model.path=x", "data.train_batch_size=4", *one.overrides])


def test_a_change_that_matters_is_found(embedded_task, monkeypatch):
    monkeypatch.setitem(sweep.CHANGES, "token budget", (["actor_rollout_ref.actor.clip_ratio_c=1.5", "algorithm.gamma=0.5"], False))
    one = next(sweep.case(number) for number in range(0, 500, len(sweep.CHANGES)) if "gae" in sweep.case(number).overrides[0])
    assert sweep.failure(embedded_task, one)[1].startswith(("they differ by", "AssertionError"))
