"""The whole loop (scheduler, pages, seats, stops) on both devices' code against the rules written plainly, with everything at random.

Every pass is compared with PlainScheduler's, every response with the one that the request gets alone. The GPU's loop runs here with plain
functions instead of kernels (helpers/fake_gpu.py).
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from helpers.fake_backend import FakeBackend
from helpers.fake_gpu import fake_gpu
from helpers.fake_model import VOCABULARY, FakeModel
from helpers.fake_streams import generate
from helpers.plain_scheduler import CheckedScheduler
from helpers.rollouts import sampling
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.generation.backend import Backend
from lockstep.workers.rollout.request import Completion, Request, Stopping
from lockstep.workers.rollout.sampling import request_keys


def letters(ids: list[int]) -> str:
    return "".join(chr(65 + token) for token in ids)


class Case:
    """One random generation."""

    def __init__(self, seed: int) -> None:
        rng = self.rng = random.Random(seed)
        self.page_size = rng.choice([1, 2, 3, 8])
        self.seats = rng.choice([1, 2, 5, 12, 40])
        self.budget = rng.choice([1, 4, 10, 30, 1000])
        self.params = sampling(
            temperature=rng.choice([0.0, 1.0, 1.0]),
            top_k=rng.choice([-1, -1, 5]),
            repetition_penalty=rng.choice([1.0, 1.0, 1.5]),
            presence_penalty=rng.choice([0.0, 0.0, 2.0]),
            frequency_penalty=rng.choice([0.0, 0.0, 1.5]),
            stop_token_ids=tuple(rng.sample(range(-1, VOCABULARY + 1), rng.choice([0, 2]))),
            seed=seed,
        )
        self.requests = self._requests()
        most = max(-(-(len(r.prompt_ids) + r.max_tokens - 1) // self.page_size) for r in self.requests)  # type: ignore[operator]
        bad = rng.choice([None, None, None, rng.randrange(VOCABULARY)])
        self.model = FakeModel(1 + most + rng.choice([0, 1, 3, 12, 100]), self.page_size, bad)

    def _requests(self) -> list[Request]:
        rng = self.rng
        requests = []
        n = rng.choice([1, 3, 6])
        for prompt in range(rng.randint(1, 6)):
            ids = torch.tensor([rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 14))])
            for k in range(n):
                own = rng.choice([None, None, (rng.randrange(VOCABULARY),), ()])
                string = rng.choice([None, None, None, (letters([rng.randrange(VOCABULARY)]),)])
                requests.append(Request(ids, (0, prompt, k), max_tokens=rng.randint(1, 20), stop_token_ids=own, stop=string))
        if rng.random() < 0.3:
            rng.shuffle(requests)
        # It is there from the start, and says with the others of its kind what all samples have in common.
        self.longest = max(range(len(requests)), key=lambda i: len(requests[i].prompt_ids) + requests[i].max_tokens)  # type: ignore[operator]
        requests[self.longest] = replace(requests[self.longest], stop_token_ids=None)
        return requests

    def scheduler(self, lookahead: int = 1, mixed: bool = True) -> CheckedScheduler:
        made = CheckedScheduler(self.model, self.seats, self.budget, lookahead, mixed)
        if self.rng.random() < 0.5:
            made.arrives = {
                i: self.rng.randint(0, 20)
                for i, request in enumerate(self.requests)
                if request.stop_token_ids is None and i != self.longest
            }
        return made

    @property
    def limits(self) -> dict[int, Stopping]:
        return {index: Stopping.of(request, self.params, None, letters) for index, request in enumerate(self.requests)}

    def generate(self, backend: Backend, scheduler: CheckedScheduler) -> list[Completion]:
        return generate(backend, scheduler, self.requests, self.params, self.take_aborts, letters)

    def take_aborts(self) -> set[int]:
        return {self.rng.randrange(len(self.requests) + 1)} if self.rng.random() < 0.02 else set()

    def check(self, completions: list[Completion], scheduler: CheckedScheduler) -> None:
        """Each request is answered once, by what it gets alone (or the start of that, if it was aborted), and nothing is held any more."""
        assert sorted(completion.index for completion in completions) == list(range(len(self.requests)))
        keys = request_keys(self.params.seed, [request.key for request in self.requests]).tolist()
        for completion in completions:
            request = self.requests[completion.index]
            limits = self.limits[completion.index]
            stop = limits.token_ids | {ord(string) - 65 for string in limits.strings}
            ids, reason = self.model.alone(
                request.prompt_ids.tolist(), keys[completion.index], limits.max_tokens, stop, self.params
            )
            if completion.finish_reason == "abort":
                assert completion.ids.tolist() == ids[: len(completion.ids)]
            elif reason == "error":
                assert completion.finish_reason == "error"
                assert f"not finite at token {len(ids) - 1} of" in str(completion.error)
            else:
                assert (completion.ids.tolist(), completion.finish_reason) == (ids, reason)
                assert torch.isfinite(completion.log_probs).all()
            assert len(completion.ids) == len(completion.log_probs)
        assert scheduler.pool.num_free == scheduler.pool.capacity
        assert scheduler.is_idle


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**9), mixed=st.booleans())
def test_passes_one_by_one_give_every_request_what_it_gets_alone(seed: int, mixed: bool) -> None:
    """The loop of the CPU."""
    case = Case(seed)
    scheduler = case.scheduler(mixed=mixed)
    case.check(case.generate(FakeBackend(case.model, mixed), scheduler), scheduler)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**9),
    lookahead=st.sampled_from([1, 3, 8]),
    batch_invariant=st.sampled_from([False, False, True]),
    kv_heads=st.sampled_from([1, 64]),
    kept=st.sampled_from(["auto", "fp8"]),
)
def test_intervals_that_are_read_late_give_every_request_what_it_gets_alone(
    seed: int, lookahead: int, batch_invariant: bool, kv_heads: int, kept: str
) -> None:
    """The loop of the GPU; with pages of fewer bits every token that is read has its own scales beside it."""
    case = Case(seed)
    with pytest.MonkeyPatch.context() as patch:
        gpu = fake_gpu(patch, case.model, lookahead, batch_invariant, kv_heads, kept)
        scheduler = case.scheduler(lookahead, mixed=False)
        case.check(case.generate(gpu, scheduler), scheduler)
