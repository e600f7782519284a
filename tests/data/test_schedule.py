from __future__ import annotations

import pytest
import torch
from helpers.errors import raises
from hypothesis import given
from hypothesis import strategies as st

from lockstep.data.schedule import PromptSchedule
from lockstep.errors import ConfigError


@st.composite
def schedules(draw: st.DrawFn) -> PromptSchedule:
    num_rows = draw(st.integers(1, 60))
    return PromptSchedule(num_rows, draw(st.integers(1, num_rows)), draw(st.booleans()), draw(st.integers(-5, 2**40)))


@given(schedule=schedules(), epoch=st.integers(0, 5))
def test_an_epoch_visits_different_rows_and_all_of_them_when_batches_fit(schedule, epoch):
    steps = range(epoch * schedule.steps_per_epoch, (epoch + 1) * schedule.steps_per_epoch)
    assert {schedule.epoch(step) for step in steps} == {epoch}
    rows = [row for step in steps for row in schedule.batch(step)]
    assert len(rows) == schedule.num_rows // schedule.batch_size * schedule.batch_size
    assert len(set(rows)) == len(rows)
    assert set(rows) <= set(range(schedule.num_rows))


@given(schedule=schedules(), steps=st.permutations(range(8)))
def test_a_batch_depends_on_its_step_alone(schedule, steps):
    in_order = [schedule.batch(step) for step in range(8)]
    torch.manual_seed(len(steps))
    other = PromptSchedule(schedule.num_rows, schedule.batch_size, schedule.shuffle, schedule.seed)
    assert {step: other.batch(step) for step in steps} == dict(enumerate(in_order))


def test_epochs_and_seeds_have_different_orders_and_no_seed_is_another_one_shifted():
    orders = {(seed, epoch): tuple(PromptSchedule(20, 20, True, seed).batch(epoch)) for seed in range(4) for epoch in range(4)}
    orders[2**32, 0] = tuple(PromptSchedule(20, 20, True, 2**32).batch(0))
    assert len(set(orders.values())) == len(orders)


def test_without_shuffle_rows_come_in_order_every_epoch():
    schedule = PromptSchedule(num_rows=7, batch_size=3, shuffle=False, seed=0)
    assert [schedule.batch(step) for step in range(4)] == [[0, 1, 2], [3, 4, 5], [0, 1, 2], [3, 4, 5]]


def test_drawing_a_batch_leaves_the_global_generator_alone():
    before = torch.get_rng_state()
    PromptSchedule(10, 2, True, 0).batch(3)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("batch_size", [0, 11])
def test_a_batch_that_does_not_fit_names_the_key_and_the_rows(batch_size):
    with raises(ConfigError, "data.train_batch_size") as error:
        PromptSchedule(10, batch_size, True, 0)
    assert f"={batch_size} " in str(error.value)
    assert "10" in str(error.value)


def test_a_negative_step_is_an_error():
    with pytest.raises(ValueError, match="-1"):
        PromptSchedule(10, 2, True, 0).batch(-1)
