"""Scheduler and CPU loop over a model without weights: what is computed, in which order, and that no page is lost.

test_whole_loop.py compares everything with a plain model of it.
"""

from __future__ import annotations

import math
import random

import pytest
import torch
from helpers.fake_backend import FakeBackend
from helpers.fake_model import VOCABULARY, FakeModel
from helpers.fake_streams import generate
from helpers.rollouts import sampling
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.generation.pages import PagePool
from lockstep.generation.prefix_cache import PrefixCache
from lockstep.generation.scheduler import PENDING, Pass, PassRow, Prompt, Sample, Scheduler
from lockstep.workers.rollout.request import Completion, Request, Stopping
from lockstep.workers.rollout.sampling import request_keys

STOP = (40,)
PARAMS = sampling(max_tokens=10_000, stop_token_ids=STOP)


class Loop:
    """The loop of the CPU over a FakeModel."""

    def __init__(
        self, requests: list[Request], num_pages: int, seats: int, budget: int, page_size: int = 4, **options: bool
    ) -> None:
        self.requests = requests
        self.model = FakeModel(num_pages, page_size, options.pop("bad_token", None))
        self.backend = FakeBackend(self.model, **options)
        self.scheduler = Scheduler(PagePool(num_pages, page_size), seats, budget, 1, self.backend.mixed)

    def run(self, take_aborts=set) -> list[Completion]:  # type: ignore[no-untyped-def]
        return generate(self.backend, self.scheduler, self.requests, PARAMS, take_aborts)

    def check(self) -> None:
        """Every request gets what it gets alone, and no page is held any more."""
        completions = self.run()
        assert sorted(completion.index for completion in completions) == list(range(len(self.requests)))
        keys = request_keys(PARAMS.seed, [request.key for request in self.requests]).tolist()
        for completion in completions:
            request = self.requests[completion.index]
            assert request.max_tokens is not None
            ids = request.prompt_ids.tolist()
            expected = self.model.alone(ids, keys[completion.index], request.max_tokens, frozenset(STOP), PARAMS)
            assert (completion.ids.tolist(), completion.finish_reason) == expected
            assert len(completion.log_probs) == len(completion.ids)
        assert self.scheduler.pool.num_free == self.scheduler.pool.capacity
        assert self.scheduler.is_idle


def random_requests(rng: random.Random, prompts: int, n: int, longest_prompt: int, longest_response: int) -> list[Request]:
    requests = []
    for prompt in range(prompts):
        ids = torch.tensor([rng.randrange(VOCABULARY) for _ in range(rng.randint(1, longest_prompt))])
        requests += [Request(ids, (0, prompt, k), max_tokens=rng.randint(1, longest_response)) for k in range(n)]
    return requests


def sample_of(index: int, prompt: Prompt, max_tokens: int = 50) -> Sample:
    return Sample(index, prompt, Stopping(max_tokens, frozenset(), (), None))


def test_a_prompt_of_which_the_budget_leaves_one_token_is_still_prefill() -> None:
    """Its last token is drawn from in a pass without decoding rows, and its samples share it."""
    scheduler = Scheduler(PagePool(200, 16), max_num_seqs=8, max_num_batched_tokens=32, lookahead=8, mixed=False)
    first = Prompt(list(range(12)))
    second = Prompt(list(range(21)))
    scheduler.add([sample_of(0, first), sample_of(1, second), sample_of(2, second)])
    passes = []
    for _ in range(3):
        rows = scheduler.plan().rows
        passes.append([(row.sample.index, row.count, [s.index for s in row.draws]) for row in rows])
        for row in rows:
            draws = row.draws
            if not draws:
                scheduler.advance(row)
            for sample in draws:
                scheduler.append(sample, [5], [0.0])
    assert passes == [[(0, 12, [0]), (1, 20, [])], [(1, 1, [1, 2])], [(0, 1, [0]), (1, 1, [1]), (2, 1, [2])]]


def test_samples_that_arrive_apart_do_not_go_on_from_a_prompt_before_it_is_computed() -> None:
    """The second sample of the first prompt waits for the next pass: its page is copied before the pass that fills it."""
    scheduler = Scheduler(PagePool(200, 4), max_num_seqs=8, max_num_batched_tokens=64)
    first = Prompt(list(range(7)))
    second = Prompt(list(range(20, 25)))
    scheduler.add([sample_of(0, first), sample_of(1, second), sample_of(2, first)])
    assert [(row.sample.index, row.sample.num_cached, row.count) for row in scheduler.plan().rows] == [(0, 0, 7), (1, 0, 5)]
    assert first.num_kept == 7


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    page_size=st.sampled_from([1, 3, 8]),
    spare_pages=st.integers(0, 40),
    seats=st.sampled_from([1, 2, 5, 40]),
    n=st.sampled_from([1, 3, 6]),
)
def test_in_one_shape_a_prompt_is_computed_whole_and_a_response_a_token_at_a_time(
    seed: int, page_size: int, spare_pages: int, seats: int, n: int
) -> None:
    """In any pool, with any seats: what a pass computes of a request does not depend on the others."""
    rng = random.Random(seed)
    requests = random_requests(rng, prompts=rng.randint(1, 6), n=n, longest_prompt=14, longest_response=20)
    if rng.random() < 0.3:
        rng.shuffle(requests)
    most = max(-(-(len(r.prompt_ids) + r.max_tokens - 1) // page_size) for r in requests)  # type: ignore[operator]
    loop = Loop(requests, 1 + most + spare_pages, seats, 1 << 20, page_size, mixed=False)
    scheduler = loop.scheduler
    scheduler.in_one_shape = True
    shapes: dict[int, list[tuple[int, int]]] = {}
    plan = scheduler.plan

    def seen() -> Pass:
        found = plan()
        for row in found.rows:
            for sample in (row.sample, *row.followers):
                shapes.setdefault(sample.index, []).append((row.sample.num_cached, row.count))
        return found

    scheduler.plan = seen  # type: ignore[method-assign]
    loop.check()
    assert scheduler.num_preemptions == 0
    for index, request in enumerate(requests):
        first, *others = shapes[index]
        assert first == (0, len(request.prompt_ids))
        assert all(count == 1 for _, count in others)
        places = [cached for cached, _ in others]
        assert places == sorted(set(places))


def test_ten_thousand_requests_go_through_a_small_pool_without_a_leak() -> None:
    """A pool of 240 tokens for requests of up to 40, three samples a prompt."""
    rng = random.Random(7)
    requests = random_requests(rng, prompts=3334, n=3, longest_prompt=16, longest_response=24)
    loop = Loop(requests, num_pages=61, seats=24, budget=64)
    completions = loop.run()
    assert sorted(completion.index for completion in completions) == list(range(10_002))
    assert loop.scheduler.pool.num_free == loop.scheduler.pool.capacity
    assert loop.scheduler.num_preemptions > 100
    assert loop.backend.most_rows > 8


def test_samples_of_one_prompt_compute_it_once() -> None:
    prompt = torch.arange(2, 62) % VOCABULARY
    requests = [Request(prompt, (0, 0, k), max_tokens=4) for k in range(8)]
    loop = Loop(requests, num_pages=200, seats=8, budget=1000, page_size=8)
    loop.check()
    assert loop.model.num_tokens == 60 + 8 * 3  # the last token of a response is never computed


def test_samples_that_find_no_seat_reuse_the_prompt_and_compute_its_last_token_again() -> None:
    prompt = torch.arange(2, 62) % VOCABULARY
    requests = [Request(prompt, (0, 0, k), max_tokens=4) for k in range(8)]
    loop = Loop(requests, num_pages=200, seats=3, budget=1000, page_size=8)
    loop.check()
    assert loop.model.num_tokens == 60 + 8 * 3 + 5


def test_without_shortage_nothing_is_preempted() -> None:
    rng = random.Random(1)
    requests = random_requests(rng, prompts=20, n=2, longest_prompt=16, longest_response=16)
    loop = Loop(requests, num_pages=2000, seats=16, budget=64)
    loop.check()
    assert loop.scheduler.num_preemptions == 0


def test_responses_come_as_they_finish() -> None:
    limits = [9, 2, 5]
    requests = [Request(torch.tensor([10 + i]), (0, i, 0), max_tokens=n, stop_token_ids=()) for i, n in enumerate(limits)]
    assert [completion.index for completion in Loop(requests, num_pages=50, seats=8, budget=100).run()] == [1, 2, 0]


def test_an_aborted_request_ends_with_what_it_has_and_frees_its_pages() -> None:
    requests = [Request(torch.tensor([10 + i]), (0, i, 0), max_tokens=30, stop_token_ids=()) for i in range(4)]
    loop = Loop(requests, num_pages=100, seats=2, budget=100)
    passes = 0

    def take_aborts() -> set[int]:
        nonlocal passes
        passes += 1
        return {0, 3, 77} if passes == 6 else set()  # one that runs, one that waits, one that does not exist

    completions = {completion.index: completion for completion in loop.run(take_aborts)}
    assert completions[0].finish_reason == completions[3].finish_reason == "abort"
    assert (len(completions[0].ids), len(completions[3].ids)) == (5, 0)
    assert [len(completions[i].ids) for i in (1, 2)] == [30, 30]
    assert loop.scheduler.pool.num_free == loop.scheduler.pool.capacity


def test_a_row_whose_logits_are_not_finite_ends_alone() -> None:
    requests = [Request(torch.tensor([token]), (0, token, 0), max_tokens=6, stop_token_ids=()) for token in (20, 21, 22)]
    loop = Loop(requests, num_pages=50, seats=8, budget=100, bad_token=21)
    completions = {completion.index: completion for completion in loop.run()}
    assert [completions[i].finish_reason for i in range(3)] == ["length", "error", "length"]
    assert "request (0, 21, 0) (step, prompt, sample): the model's logits are not finite at token 0" in str(completions[1].error)
    assert len(completions[1].ids) == 0
    assert loop.scheduler.pool.num_free == loop.scheduler.pool.capacity


@pytest.mark.parametrize("mixed", [True, False])
def test_the_budget_bounds_the_tokens_of_a_pass(mixed: bool) -> None:
    requests = [Request(torch.arange(2, 30), (0, i, 0), max_tokens=3) for i in range(5)]
    loop = Loop(requests, num_pages=100, seats=8, budget=10, mixed=mixed)
    sizes = []
    logits = loop.model.logits

    def watched(tokens, *others):  # type: ignore[no-untyped-def]
        sizes.append(len(tokens))
        return logits(tokens, *others)

    loop.model.logits = watched  # type: ignore[method-assign]
    loop.check()
    assert max(sizes) == 10


def test_a_large_request_is_not_overtaken_by_small_ones_behind_it() -> None:
    """It needs all pages: it waits until the first is over, and those behind it wait too."""
    scheduler = Scheduler(PagePool(11, 4), max_num_seqs=8, max_num_batched_tokens=64)
    scheduler.add([sample_of(0, Prompt([1] * 4), 4), sample_of(1, Prompt([2] * 36), 4), sample_of(2, Prompt([3]), 4)])
    first = scheduler.plan().rows
    assert [row.sample.index for row in first] == [0]
    scheduler.append(first[0].sample, [5], [0.0])
    assert [row.sample.index for row in scheduler.plan().rows] == [0]
    scheduler.finish(first[0].sample)
    assert [row.sample.index for row in scheduler.plan().rows] == [1]


SIZE = 4
START = list(range(2 * SIZE))


def scheduler(budget: int = 100) -> Scheduler:
    pool = PagePool(20, SIZE)
    return Scheduler(pool, 8, budget, cache=PrefixCache(pool))


def add(made: Scheduler, index: int, keep: bool = False) -> Sample:
    """A sample that starts like all others, and runs: its prompt is in the pass that is planned here."""
    sample = Sample(index, Prompt([*START, 50 + index]), Stopping(5, frozenset(), (), None), key=index, keep=keep)
    made.add([sample])
    made.plan()
    return sample


def reuses(made: Scheduler, index: int) -> bool:
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


def left_by_a_kept_sample(made: Scheduler) -> Prompt:
    """A prompt that goes on after a sample that was kept: START, 50 and 7, of which all but the last token is in the cache."""
    first = add(made, 0, keep=True)
    made.append(first, [7], [-1.0])
    made.finish(first)
    made.settle(first, "length")
    return Prompt([*START, 50, 7, 8])


def test_who_goes_on_first_gets_the_begun_page_of_a_turn_and_another_computes_it_again() -> None:
    made = scheduler()
    prompts = [left_by_a_kept_sample(made), Prompt([*START, 50, 7, 9])]
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
    waits = left_by_a_kept_sample(made)
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
