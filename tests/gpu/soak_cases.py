"""The cases of the soak (gpu/soak.py): models, settings, sampling parameters and requests, drawn from a number."""

from __future__ import annotations

import dataclasses
import random
from typing import NamedTuple

import torch
from torch import Tensor

from lockstep.config.sampling import SamplingParams
from lockstep.workers.rollout.request import Request

VOCABULARY, BAD = 32, 31
"""Token BAD has no finite embedding: a request that has it, or draws it, ends with an error."""
CONTEXT = 256
FAMILIES_DRAWN = ("llama", "qwen2", "qwen3", "mistral", "gemma2")


class Settings(NamedTuple):
    """Of an engine."""

    max_num_seqs: int
    max_num_batched_tokens: int
    batch_invariant: bool


@dataclasses.dataclass(frozen=True)
class Arrival:
    """A request, and when it comes."""

    request: Request
    tick: int = 0
    """Passes from the start, or from the end of the request that it continues."""
    parent: int | None = None
    """Which arrival it continues: its prompt comes after that one's response."""
    abort_after: int | None = None
    """Passes from here to its abort."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One generation: a list of requests at once, or a stream that stays open."""

    family: str
    settings: Settings
    arrivals: list[Arrival]
    params: SamplingParams
    is_open: bool = False
    room: int | None = None
    """Tokens that the cache holds; None: as many as are wanted. With few, sequences are preempted."""
    adapters: bool = False
    """Whether the linear layers have adapters beside them."""

    @property
    def kind(self) -> str:
        if self.adapters:
            return "adapters"
        return "stream" if self.is_open else ("crowd" if len(self.arrivals) > 100 else "list")


def draw_case(seed: int) -> Case:
    """The case of this number: of ten, six are lists, four streams; one list in 25 has hundreds of requests, one case in 12 adapters."""
    rng = random.Random(seed)
    params = _params(rng, seed)
    settings = Settings(rng.choice([2, 16, 64, 256]), rng.choice([33, 256, 8192]), rng.random() < 0.2)
    family, room = rng.choice(FAMILIES_DRAWN), rng.choice([None] * 6 + [320, 1024])
    adapters = rng.random() < 1 / 12
    if rng.random() < 0.4:
        return Case(family, settings, _stream(rng, seed), params, is_open=True, room=room, adapters=adapters)
    if rng.random() < 0.04:  # batches whose attention is not split, and that read shared pages together
        params = dataclasses.replace(params, max_tokens=min(params.max_tokens, 10))
        settings = settings._replace(max_num_seqs=rng.choice([256, 512]), batch_invariant=False)
        return Case(family, settings, _list(rng, seed, [rng.randint(100, 300) for _ in range(2)]), params)
    samples = [rng.choice([1, 2, 8]) for _ in range(rng.randint(1, 12))]
    return Case(family, settings, _list(rng, seed, samples), params, room=room, adapters=adapters)


def _params(rng: random.Random, seed: int) -> SamplingParams:
    return SamplingParams(
        temperature=rng.choice([0.0, 0.7, 1.0, 1.0]),
        top_k=rng.choice([-1, -1, 5]),
        top_p=rng.choice([1.0, 1.0, 0.9]),
        min_p=rng.choice([0.0, 0.0, 0.05]),
        repetition_penalty=rng.choice([1.0, 1.0, 1.3]),
        max_tokens=rng.choice([1, 10, 40]),
        stop_token_ids=rng.choice([(), (1,), (1, 7, -1), (500,)]),
        stop=rng.choice([(), (), ("AB", "D")]),
        seed=seed,
    )


def _ids(rng: random.Random, lengths: list[int]) -> Tensor:
    ids = torch.tensor([rng.randrange(VOCABULARY - 1) for _ in range(rng.choice(lengths))])
    if rng.random() < 0.05:
        ids[-1] = BAD
    return ids


def _list(rng: random.Random, seed: int, samples: list[int]) -> list[Arrival]:
    """Requests of as many prompts as there are numbers of samples."""
    arrivals = []
    for prompt, count in enumerate(samples):
        ids = _ids(rng, [1, 5, 64, 65, 150])
        for k in range(count):
            limit, stop = rng.choice([None, None, rng.randint(1, 60)]), rng.choice([None, None, (rng.randrange(VOCABULARY),)])
            arrivals.append(Arrival(Request(ids, (seed, prompt, k), max_tokens=limit, stop_token_ids=stop)))
    return arrivals


def _stream(rng: random.Random, seed: int) -> list[Arrival]:
    """Prompts of which some start alike, up to three turns, some continued twice, some aborted; parents come before children."""
    arrivals: list[Arrival] = []
    common = _ids(rng, [64, 130])
    for prompt in range(rng.randint(1, 8)):
        ids = _ids(rng, [1, 5, 64, 65, 100])
        ids = torch.cat([common, ids[:60]]) if rng.random() < 0.4 else ids
        for k in range(rng.choice([1, 1, 2, 8])):
            tick = rng.choice([0, 0, rng.randint(1, 12)])
            _conversation(rng, arrivals, ids, (seed, prompt, k), tick)
    return arrivals


def _conversation(rng: random.Random, arrivals: list[Arrival], ids: Tensor, key: tuple[int, int, int], tick: int) -> None:
    arrivals.append(Arrival(_own(rng, ids, key), tick, None, _abort(rng)))
    last = [len(arrivals) - 1]
    for _ in range(rng.choice([0, 0, 1, 2])):
        parent, last = rng.choice(last), []
        for _ in range(rng.choice([1, 1, 2])):
            arrivals.append(Arrival(_own(rng, _ids(rng, [1, 3, 40]), key), rng.randint(0, 4), parent, _abort(rng)))
            last.append(len(arrivals) - 1)


def _abort(rng: random.Random) -> int | None:
    return rng.choice([None] * 7 + [rng.randint(0, 4)])


def _own(rng: random.Random, ids: Tensor, key: tuple[int, int, int]) -> Request:
    """A request of a stream: some have parameters of their own, are told of their tokens, or want more log-probs."""
    return Request(
        ids,
        key,
        max_tokens=rng.choice([None, rng.randint(1, 60)]),
        sampling=_params(rng, key[0]) if rng.random() < 0.2 else None,
        streams=rng.random() < 0.3,
        top_log_probs=rng.choice([0, 0, 0, 3]),
        prompt_log_probs=rng.random() < 0.15,
    )
