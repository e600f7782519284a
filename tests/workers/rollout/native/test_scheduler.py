"""Scheduler and generation loop over a runner without a model: every token is right, and no page is lost."""

import random

import pytest
import torch
from helpers.fake_runner import VOCABULARY, FakeRunner, expected_response
from helpers.rollouts import sampling
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.workers.rollout.base import Completion, Request, Stopping
from lockstep.workers.rollout.counted import request_keys
from lockstep.workers.rollout.native.generation import Generation
from lockstep.workers.rollout.native.pages import PagePool
from lockstep.workers.rollout.native.scheduler import Plan, Prompt, Scheduler, Sequence

STOP = (3, 500)
PARAMS = sampling(max_tokens=10_000, stop_token_ids=STOP)


def make(requests: list[Request], num_pages: int, seats: int, budget: int, runner: FakeRunner) -> tuple[Generation, Scheduler]:
    runner.open(num_pages)
    scheduler = Scheduler(PagePool(num_pages, runner.page_size), seats, budget, runner.lookahead, runner.mixed)
    stopping = {index: Stopping.of(request, PARAMS, None, None) for index, request in enumerate(requests)}
    return Generation(runner, scheduler, requests, stopping, PARAMS, version=0), scheduler


def random_requests(rng: random.Random, prompts: int, n: int, longest_prompt: int, longest_response: int) -> list[Request]:
    requests = []
    for prompt in range(prompts):
        ids = torch.tensor([rng.randrange(VOCABULARY) for _ in range(rng.randint(1, longest_prompt))])
        requests += [Request(ids, (0, prompt, k), max_tokens=rng.randint(1, longest_response)) for k in range(n)]
    return requests


def check(requests: list[Request], completions: list[Completion], scheduler: Scheduler) -> None:
    assert sorted(completion.index for completion in completions) == list(range(len(requests)))
    keys = request_keys(PARAMS.seed, [request.key for request in requests]).tolist()
    for completion in completions:
        request = requests[completion.index]
        assert request.max_tokens is not None
        expected = expected_response(request.prompt_ids.tolist(), keys[completion.index], request.max_tokens, set(STOP))
        assert completion.ids.tolist() == expected
        assert completion.finish_reason == ("stop" if expected[-1] in STOP else "length")
        assert len(completion.log_probs) == len(expected)
    assert scheduler.pool.num_used == 0
    assert scheduler.is_idle


def watch_passes(scheduler: Scheduler) -> None:
    """Check of every pass what a loop that keeps a row for each sequence builds on: several tokens are drawn only where every row has
    drawn since it was admitted, and without `mixed` such rows are alone."""
    plan, append, has_drawn = scheduler.plan, scheduler.append, set[int]()

    def checked() -> Plan:
        found = plan()
        has_drawn.intersection_update(id(sequence) for sequence in scheduler.running)  # a preempted one starts again
        decodes = [id(row.sequence) in has_drawn for row in found.rows]
        assert found.num_steps == 1 or all(decodes)
        assert scheduler.mixed or all(decodes) or not any(decodes)
        return found

    def appended(sequence: Sequence, tokens: list[int], log_probs: list[float]) -> None:
        append(sequence, tokens, log_probs)
        has_drawn.add(id(sequence))

    scheduler.plan, scheduler.append = checked, appended  # type: ignore[method-assign]


def test_a_prompt_of_which_the_budget_leaves_one_token_is_still_prefill() -> None:
    """Its last token is drawn from in a pass without decoding rows, and its samples share it."""
    scheduler = Scheduler(PagePool(200, 16), max_num_seqs=8, max_num_batched_tokens=32, lookahead=8, mixed=False)
    watch_passes(scheduler)
    first, second = Prompt(list(range(12))), Prompt(list(range(21)))
    scheduler.add([Sequence(0, first, 50), Sequence(1, second, 50), Sequence(2, second, 50)])
    passes = []
    for _ in range(3):
        rows = scheduler.plan().rows
        passes.append([(row.sequence.index, row.count, [s.index for s in row.draws]) for row in rows])
        for row in rows:
            draws = row.draws
            if not draws:
                scheduler.advance(row)
            for sequence in draws:
                scheduler.append(sequence, [5], [0.0])
    assert passes == [[(0, 12, [0]), (1, 20, [])], [(1, 1, [1, 2])], [(0, 1, [0]), (1, 1, [1]), (2, 1, [2])]]


@settings(max_examples=120, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    page_size=st.sampled_from([1, 3, 8]),
    spare_pages=st.integers(0, 12),
    seats=st.sampled_from([1, 2, 5, 40]),
    budget=st.sampled_from([1, 4, 30, 1000]),
    lookahead=st.sampled_from([1, 4]),
    mixed=st.booleans(),
    n=st.sampled_from([1, 3, 6]),
)
def test_every_response_is_right_in_any_pool_with_any_seats_and_budget(
    seed: int, page_size: int, spare_pages: int, seats: int, budget: int, lookahead: int, mixed: bool, n: int
) -> None:
    """From a pool that holds the longest request and nothing else, to one without shortage."""
    rng = random.Random(seed)
    requests = random_requests(rng, prompts=rng.randint(1, 6), n=n, longest_prompt=14, longest_response=20)
    if rng.random() < 0.3:
        rng.shuffle(requests)
    most = max(-(-(len(r.prompt_ids) + r.max_tokens - 1) // page_size) for r in requests)  # type: ignore[operator]
    generation, scheduler = make(requests, 1 + most + spare_pages, seats, budget, FakeRunner(page_size, lookahead, mixed))
    watch_passes(scheduler)
    check(requests, list(generation.run(set)), scheduler)


@settings(max_examples=120, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    page_size=st.sampled_from([1, 3, 8]),
    spare_pages=st.integers(0, 40),
    seats=st.sampled_from([1, 2, 5, 40]),
    lookahead=st.sampled_from([1, 4]),
    n=st.sampled_from([1, 3, 6]),
)
def test_in_one_shape_a_prompt_is_computed_whole_and_a_response_a_token_at_a_time(
    seed: int, page_size: int, spare_pages: int, seats: int, lookahead: int, n: int
) -> None:
    """In any pool, with any seats: what a pass computes of a request does not depend on the others."""
    rng = random.Random(seed)
    requests = random_requests(rng, prompts=rng.randint(1, 6), n=n, longest_prompt=14, longest_response=20)
    if rng.random() < 0.3:
        rng.shuffle(requests)
    most = max(-(-(len(r.prompt_ids) + r.max_tokens - 1) // page_size) for r in requests)  # type: ignore[operator]
    runner = FakeRunner(page_size, lookahead, mixed=False)
    generation, scheduler = make(requests, 1 + most + spare_pages, seats, 1 << 20, runner)
    scheduler.in_one_shape = True
    shapes: dict[int, list[tuple[int, int]]] = {}
    plan = scheduler.plan

    def seen() -> Plan:
        found = plan()
        for row in found.rows:
            for sequence in (row.sequence, *row.followers):
                shapes.setdefault(sequence.index, []).append((row.sequence.num_cached, row.count))
        return found

    scheduler.plan = seen  # type: ignore[method-assign]
    check(requests, list(generation.run(set)), scheduler)
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
    runner = FakeRunner(page_size=4)
    generation, scheduler = make(requests, num_pages=61, seats=24, budget=64, runner=runner)
    check(requests, list(generation.run(set)), scheduler)
    assert len(requests) > 10_000
    assert scheduler.num_preemptions > 100
    assert runner.most_rows > 8


def test_samples_of_one_prompt_compute_it_once() -> None:
    prompt = torch.arange(2, 62)
    requests = [Request(prompt, (0, 0, k), max_tokens=4) for k in range(8)]
    runner = FakeRunner(page_size=8)
    generation, scheduler = make(requests, num_pages=200, seats=8, budget=1000, runner=runner)
    check(requests, list(generation.run(set)), scheduler)
    assert runner.num_tokens == 60 + 8 * 3  # the last token of a response is never computed


def test_samples_that_find_no_seat_reuse_the_prompt_and_compute_its_last_token_again() -> None:
    prompt = torch.arange(2, 62)
    requests = [Request(prompt, (0, 0, k), max_tokens=4) for k in range(8)]
    runner = FakeRunner(page_size=8)
    generation, scheduler = make(requests, num_pages=200, seats=3, budget=1000, runner=runner)
    check(requests, list(generation.run(set)), scheduler)
    assert runner.num_tokens == 60 + 8 * 3 + 5


def test_without_shortage_nothing_is_preempted() -> None:
    rng = random.Random(1)
    requests = random_requests(rng, prompts=20, n=2, longest_prompt=16, longest_response=16)
    generation, scheduler = make(requests, num_pages=2000, seats=16, budget=64, runner=FakeRunner(4))
    check(requests, list(generation.run(set)), scheduler)
    assert scheduler.num_preemptions == 0


def test_responses_come_as_they_finish() -> None:
    limits = [9, 2, 5]
    requests = [Request(torch.tensor([10 + i]), (0, i, 0), max_tokens=n, stop_token_ids=()) for i, n in enumerate(limits)]
    generation, _ = make(requests, num_pages=50, seats=8, budget=100, runner=FakeRunner(4))
    assert [completion.index for completion in generation.run(set)] == [1, 2, 0]


def test_an_aborted_request_ends_with_what_it_has_and_frees_its_pages() -> None:
    requests = [Request(torch.tensor([10 + i]), (0, i, 0), max_tokens=30, stop_token_ids=()) for i in range(4)]
    generation, scheduler = make(requests, num_pages=100, seats=2, budget=100, runner=FakeRunner(4))
    passes = 0

    def take_aborts() -> set[int]:
        nonlocal passes
        passes += 1
        return {0, 3, 77} if passes == 6 else set()  # one that runs, one that waits, one that does not exist

    completions = {completion.index: completion for completion in generation.run(take_aborts)}
    assert completions[0].finish_reason == completions[3].finish_reason == "abort"
    assert (len(completions[0].ids), len(completions[3].ids)) == (5, 0)
    assert [len(completions[i].ids) for i in (1, 2)] == [30, 30]
    assert scheduler.pool.num_used == 0


def test_a_row_whose_logits_are_not_finite_ends_alone() -> None:
    requests = [Request(torch.tensor([token]), (0, token, 0), max_tokens=6, stop_token_ids=()) for token in (20, 21, 22)]
    generation, scheduler = make(requests, num_pages=50, seats=8, budget=100, runner=FakeRunner(4, bad_token=21))
    completions = {completion.index: completion for completion in generation.run(set)}
    assert [completions[i].finish_reason for i in range(3)] == ["length", "error", "length"]
    assert "request (0, 21, 0) (step, prompt, sample): the model's logits are not finite at token 0" in str(completions[1].error)
    assert len(completions[1].ids) == 0
    assert scheduler.pool.num_used == 0


@pytest.mark.parametrize("mixed", [True, False])
def test_the_budget_bounds_the_tokens_of_a_pass(mixed: bool) -> None:
    requests = [Request(torch.arange(2, 30), (0, i, 0), max_tokens=3) for i in range(5)]
    sizes = []

    class Watched(FakeRunner):
        def step(self, batch, sampling):  # type: ignore[no-untyped-def]
            sizes.append(len(batch.input_ids))
            return super().step(batch, sampling)

    generation, scheduler = make(requests, num_pages=100, seats=8, budget=10, runner=Watched(4, mixed=mixed))
    check(requests, list(generation.run(set)), scheduler)
    assert max(sizes) == 10
