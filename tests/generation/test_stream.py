"""Open streams on both devices' code with everything at random: requests that join, go on, stop and leave while others run.

The model has no weights (helpers/fake_model.py): every response is compared with the one that the request gets alone.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from helpers.checked_open import CheckedOpen
from helpers.fake_backend import FakeBackend
from helpers.fake_gpu import fake_gpu, loop, short_prefill
from helpers.fake_model import VOCABULARY, FakeModel
from helpers.fake_streams import fake_engine
from helpers.rollouts import sampling
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lockstep.config.sampling import SamplingParams
from lockstep.generation.backend import Backend
from lockstep.generation.stream import NativeStream
from lockstep.workers.rollout.request import Completion, Request, Stopping, Tokens
from lockstep.workers.rollout.sampling import request_keys

CONTEXT = 90


def letters(ids: list[int]) -> str:
    return "".join(chr(65 + token) for token in ids)


@dataclass
class Asked:
    """A request that was added, and what came of it."""

    request: Request
    ids: list[int]
    """All tokens before the response."""
    position: int
    pieces: list[Tokens] = field(default_factory=list)
    completion: Completion | None = None


class Script:
    """One random life of a stream."""

    def __init__(self, seed: int) -> None:
        rng = self.rng = random.Random(seed)
        self.page_size = rng.choice([1, 3, 8])
        self.seats = rng.choice([1, 2, 5, 12])
        self.budget = rng.choice([4, 10, 1000])
        self.default = self._params(plain=rng.random() < 0.7)
        pages = -(-CONTEXT // self.page_size) + rng.choice([0, 2, 12, 100])
        self.model = FakeModel(1 + pages, self.page_size, rng.choice([None, None, rng.randrange(VOCABULARY)]))
        self.starts = [[rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 30))] for _ in range(3)]
        self.asked: dict[int, Asked] = {}
        self.released: set[int] = set()

    def _params(self, plain: bool) -> SamplingParams:
        rng = self.rng
        options: dict[str, Any] = {} if plain else {
            "top_k": rng.choice([-1, 5]), "top_p": rng.choice([1.0, 0.8]), "min_p": rng.choice([0.0, 0.1]),
            "repetition_penalty": rng.choice([1.0, 1.5]), "presence_penalty": rng.choice([0.0, 0.7]),
            "frequency_penalty": rng.choice([0.0, -0.4]),
        }  # fmt: skip
        stop = tuple(rng.sample(range(VOCABULARY), rng.choice([0, 2])))
        temperature = rng.choice([0.0, 1.0, 0.7])
        return sampling(
            temperature=temperature, max_tokens=rng.randint(1, 20), stop_token_ids=stop, seed=rng.randrange(99), **options
        )

    def run(self, backend: Backend, scheduler: CheckedOpen) -> None:
        rng = self.rng
        engine = fake_engine(letters, CONTEXT)
        self.stream = NativeStream(engine, self.default, backend, scheduler)
        for _ in range(rng.randint(5, 60)):
            chance = rng.random()
            if chance < 0.4:
                self._add()
            elif chance < 0.45:
                self.stream.abort(rng.randrange(len(self.asked) + 1))
            elif chance < 0.5:
                index = rng.randrange(len(self.asked) + 1)
                self.stream.release(index)
                self.released.add(index)
            elif chance < 0.53:
                engine.version += 1  # the same weights, in truth: nothing that is kept may be used, and nothing changes
            else:
                self._note(self.stream.next(0))
        for answer in self.stream:
            self._note(answer)
        for index, asked in self.asked.items():
            self.check(index, asked)
            self.stream.release(index)
        scheduler.check()
        assert scheduler.is_idle
        assert scheduler.num_unsettled == 0
        if scheduler.cache is not None:
            assert scheduler.pool.num_free == scheduler.pool.capacity - len(scheduler.cache)
            scheduler.cache.clear()
        assert scheduler.pool.num_free == scheduler.pool.capacity
        self.stream.close()

    def _is_kept(self, index: int) -> bool:
        asked = self.asked.get(index)
        return asked is not None and asked.request.keep and asked.completion is not None and asked.completion.error is None

    def _add(self) -> None:
        rng = self.rng
        new = rng.choice(self.starts)[: rng.randint(1, 30)] + [rng.randrange(VOCABULARY) for _ in range(rng.choice([0, 1, 9]))]
        kept = [index for index in self.asked if self._is_kept(index)]
        continues = None
        ids = new
        position = 0
        if kept and rng.random() < 0.5:
            continues = rng.choice(kept)
            before = self.asked[continues]
            assert before.completion is not None
            ids = before.ids + before.completion.ids.tolist() + new
            position = before.position + len(before.completion.ids) + len(new)
        request = Request(
            torch.tensor(new),
            (0, rng.randrange(5), rng.randrange(5)),
            max_tokens=rng.choice([None, rng.randint(1, 20)]),
            stop=rng.choice([None, None, (letters([rng.randrange(VOCABULARY)]),)]),
            sampling=rng.choice([None, self._params(plain=True), self._params(plain=False)]),
            streams=rng.random() < 0.3,
            top_log_probs=rng.choice([0, 0, 3]),
            prompt_log_probs=rng.random() < 0.2,
            keep=rng.random() < 0.5,
            continues=continues,
        )
        self.asked[self.stream.add(request)] = Asked(request, ids, position)

    def _note(self, answer: Completion | Tokens | None) -> None:
        if isinstance(answer, Tokens):
            assert self.asked[answer.index].completion is None
            self.asked[answer.index].pieces.append(answer)
        elif answer is not None:
            assert self.asked[answer.index].completion is None
            self.asked[answer.index].completion = answer

    def check(self, index: int, asked: Asked) -> None:
        """It has what it gets alone, or the start of that if it was aborted."""
        request = asked.request
        found = asked.completion
        assert found is not None
        if len(asked.ids) >= CONTEXT or (request.continues in self.released and "continues" in str(found.error)):
            assert found.finish_reason == "error"
            return
        params = request.sampling or self.default
        limits = Stopping.of(request, params, CONTEXT, letters, len(asked.ids))
        stop = limits.token_ids | {ord(string) - 65 for string in limits.strings}
        (key,) = request_keys(params.seed, [request.key]).tolist()
        ids, reason = self.model.alone(asked.ids, key, limits.max_tokens, stop, params, asked.position)
        told = [token for piece in asked.pieces for token in piece.ids.tolist()]
        if found.finish_reason == "error":
            assert reason == "error"
            assert f"not finite at token {len(ids) - 1} of" in str(found.error)
            assert told == (ids[:-1] if request.streams else [])
            return
        assert told == (found.ids.tolist() if request.streams else [])
        if found.finish_reason == "abort":
            assert found.ids.tolist() == ids[: len(found.ids)]
        else:
            assert (found.ids.tolist(), found.finish_reason) == (ids, reason)
        self._check_scores(asked, found, params.temperature)

    def _check_scores(self, asked: Asked, found: Completion, temperature: float) -> None:
        request = asked.request
        every = asked.ids + found.ids.tolist()
        places = range(len(asked.ids), len(every))
        self._check_top(found.top_log_probs, request.top_log_probs, [every[:i] for i in places], temperature)
        for place, token, log_prob in zip(places, found.ids.tolist(), found.log_probs.tolist(), strict=True):
            expected = self.model.log_probs_after(every[:place], temperature)[token]
            assert log_prob == pytest.approx(float(expected), abs=1e-5)
        assert (found.prompt_log_probs is not None) == request.prompt_log_probs
        if found.prompt_log_probs is None or (found.finish_reason == "abort" and not len(found.ids)):
            return
        start = len(asked.ids) - len(request.prompt_ids)
        for i, log_prob in enumerate(found.prompt_log_probs.tolist(), start):
            if i == 0:
                assert log_prob != log_prob
            elif self.model.bad_token != asked.ids[i - 1]:
                assert log_prob == pytest.approx(
                    float(self.model.log_probs_after(asked.ids[:i], temperature)[asked.ids[i]]), abs=1e-5
                )
        before = [asked.ids[:i] for i in range(start, len(asked.ids))]
        self._check_top(found.prompt_top_log_probs, request.top_log_probs, before, temperature)

    def _check_top(self, found: Any, top: int, before: list[list[int]], temperature: float) -> None:
        assert (found is not None) == (top > 0)
        for tokens, own in zip(before, found or [], strict=bool(found)):
            if not tokens or tokens[-1] == self.model.bad_token:
                continue
            values, ids = self.model.log_probs_after(tokens, temperature).topk(top)
            assert [token for token, _ in own] == ids.tolist()
            assert [value for _, value in own] == pytest.approx(values.tolist(), abs=1e-5)


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10**9), cached=st.booleans())
def test_passes_one_by_one_give_every_request_what_it_gets_alone(seed: int, cached: bool) -> None:
    """The loop of the CPU."""
    script = Script(seed)
    script.run(FakeBackend(script.model), CheckedOpen(script.model, script.seats, script.budget, cached=cached))


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 10**9),
    cached=st.booleans(),
    lookahead=st.sampled_from([1, 8]),
    batch_invariant=st.booleans(),
    kept=st.sampled_from(["auto", "fp8"]),
)
@example(seed=13, cached=True, lookahead=8, batch_invariant=False, kept="fp8")  # these two copy pages
@example(seed=69, cached=False, lookahead=8, batch_invariant=False, kept="fp8")
def test_intervals_that_are_read_late_give_every_request_what_it_gets_alone(
    seed: int, cached: bool, lookahead: int, batch_invariant: bool, kept: str
) -> None:
    """The loop of the GPU; with pages of fewer bits every token that is read has its own scales beside it, in turns that go on too."""
    script = Script(seed)
    with pytest.MonkeyPatch.context() as patch:
        gpu = fake_gpu(patch, script.model, lookahead, batch_invariant, random.Random(seed).choice([1, 64]), kept)
        scheduler = CheckedOpen(script.model, script.seats, script.budget, lookahead, False, cached=cached and not batch_invariant)
        scheduler.longest = CONTEXT
        patch.setattr(short_prefill, "_MOST_KEYS", random.Random(seed).choice([0, 150, 1 << 19]))  # never, sometimes, always
        patch.setattr(short_prefill, "_FEW", random.Random(seed).choice([16, 1024]))  # some are many, or none
        patch.setattr(loop, "_LONG", random.Random(seed).choice([20, 1024]))  # some contexts are long, or none
        script.run(gpu, scheduler)
