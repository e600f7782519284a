"""What samples leave to others, and when. test_open_stream.py compares whole streams with what each request gets alone."""

from __future__ import annotations

import math

import pytest

from lockstep.generation.open_scheduler import OpenScheduler
from lockstep.generation.pages import PagePool
from lockstep.generation.prefix_cache import PrefixCache
from lockstep.generation.scheduler import PENDING, PassRow, Prompt, Sample
from lockstep.workers.rollout.request import Stopping

SIZE = 4
START = list(range(2 * SIZE))


def scheduler(budget: int = 100) -> OpenScheduler:
    pool = PagePool(20, SIZE)
    return OpenScheduler(pool, 8, budget, cache=PrefixCache(pool))


def add(made: OpenScheduler, index: int, keep: bool = False) -> Sample:
    """A sample that starts like all others, and runs: its prompt is in the pass that is planned here."""
    sample = Sample(index, Prompt([*START, 50 + index]), Stopping(5, frozenset(), (), None), key=index, keep=keep)
    made.add([sample])
    made.plan()
    return sample


def reuses(made: OpenScheduler, index: int) -> bool:
    """Whether one that comes now begins with pages of those before it."""
    return add(made, index).num_cached == len(START)


def test_nobody_starts_with_a_prompt_of_which_no_token_is_known_to_be_finite() -> None:
    """As on a GPU, where tokens are known later: a number that is not finite spreads to tokens before it that are computed with it."""
    made = scheduler()
    first = add(made, 0)
    made.append(first, [PENDING], [0.0])
    assert not reuses(made, 1)
    made.confirm(first)
    assert reuses(made, 2)


def test_nobody_starts_with_a_prompt_that_is_not_finite() -> None:
    made = scheduler()
    made.append(add(made, 0), [7], [math.nan])
    assert not reuses(made, 1)


def test_a_prompt_that_is_known_to_its_end_computes_its_last_page_again_and_copies_none() -> None:
    """Its last token is drawn from, so its page is written, and pages of the cache never are."""
    made = scheduler()
    made.append(add(made, 0), [7], [-1.0])
    same = Sample(1, Prompt(START), Stopping(5, frozenset(), (), None), key=1)
    made.add([same])
    found = made.plan()
    assert (same.num_cached, [row.count for row in found.rows if row.sample is same]) == (len(START) - SIZE, [SIZE])
    assert not found.copies


def test_an_error_takes_back_what_its_sample_left() -> None:
    made = scheduler()
    first = add(made, 0)
    made.append(first, [7], [-1.0])
    assert reuses(made, 2)
    made.append(first, [7], [math.nan])
    made.finish(first)
    made.settle(first, "error")
    assert not reuses(made, 1)


@pytest.mark.parametrize("drawn", [False, True])
def test_one_that_is_aborted_leaves_its_pages_once_it_has_drawn(drawn: bool) -> None:
    """The budget cuts its prompt: before its first token, whole pages of it are computed, and nobody knows whether they are finite."""
    made = scheduler(budget=len(START))
    first = add(made, 0, keep=True)
    made.advance(PassRow(first, len(START)))
    if drawn:
        made.append(first, [7], [-1.0])
    made.finish(first)
    made.settle(first, "abort")
    assert made.ids_before(0) == [*START, 50, *([7] if drawn else [])]
    assert reuses(made, 1) == drawn


def test_the_page_of_the_last_token_is_left_to_nobody() -> None:
    """That token was drawn and not computed. With it the sample has three pages full of tokens."""
    made = scheduler()
    first = add(made, 0)
    made.append(first, [7, 8, 9], [-1.0] * 3)
    made.finish(first)
    made.settle(first, "stop")
    next_one = Sample(1, Prompt([*START, 50, 7, 8, 9, 10]), Stopping(5, frozenset(), (), None), key=1)
    made.add([next_one])
    made.plan()
    assert next_one.num_cached == len(START)


def test_a_turn_has_no_more_tokens_than_were_computed_when_its_end_is_known_late() -> None:
    """As on a GPU: three tokens were promised, and the first turns out to end the response. Only what comes before it was computed."""
    made = scheduler()
    first = add(made, 0, keep=True)
    made.append(first, [PENDING] * 3, [0.0] * 3)
    made.finish(first)
    first.tokens = [7]
    first.log_probs = [-1.0]
    made.settle(first, "stop")
    prompt = Prompt([*START, 50, 7, 8])
    made.resume(prompt, 0)
    assert prompt.num_kept == len(START) + 1


def left_by_a_turn(made: OpenScheduler) -> Prompt:
    """A prompt that goes on after a sample that was kept: START, 50 and 7, of which all but the last token is in the cache."""
    first = add(made, 0, keep=True)
    made.append(first, [7], [-1.0])
    made.finish(first)
    made.settle(first, "length")
    return Prompt([*START, 50, 7, 8])


def test_who_goes_on_first_gets_the_begun_page_of_a_turn_and_another_computes_it_again() -> None:
    made = scheduler()
    prompts = [left_by_a_turn(made), Prompt([*START, 50, 7, 9])]
    for prompt in prompts:
        made.resume(prompt, 0)
    assert [prompt.num_kept for prompt in prompts] == [len(START) + 1, len(START)]
    made.add(Sample(1 + i, prompt, Stopping(5, frozenset(), (), None), key=i) for i, prompt in enumerate(prompts))
    found = made.plan()
    assert [(row.sample.num_cached, row.count) for row in found.rows] == [(len(START) + 1, 2), (len(START), 3)]
    assert not found.copies


def test_when_the_weights_have_changed_nothing_that_is_kept_is_begun_with() -> None:
    """Neither a turn, nor what a prompt that waits has of it, nor the prefix cache; and what runs is computed anew with its tokens."""
    made = scheduler()
    waits = left_by_a_turn(made)
    runs = add(made, 3)
    made.append(runs, [7], [-1.0])
    made.resume(waits, 0)
    made.add([Sample(1, waits, Stopping(5, frozenset(), (), None), key=1)])
    made.forget()
    later = Prompt([*START, 50, 7, 9])
    made.resume(later, 0)
    assert (waits.num_kept, later.num_kept) == (0, 0)
    assert [(row.sample.index, row.sample.num_cached, row.count) for row in made.plan().rows] == [(3, 0, 10), (1, 0, 11)]
    assert not reuses(made, 2)
