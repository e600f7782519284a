"""A case of the soak (gpu/soak.py) played on an engine, and what came of it compared with the plain engine.

The plain engine answers each request of a stream as one of a list, with all that came before it as its prompt: it shares, keeps and
continues nothing.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from gpu.soak_cases import BAD, CONTEXT, Case
from helpers.families import FAMILIES
from helpers.rollouts import PAD
from helpers.tiny import tiny_model
from torch import Tensor, nn

from lockstep.config.actor_rollout_ref import RolloutConfig
from lockstep.config.sampling import SamplingParams
from lockstep.generation.cpu.passes import PAGE_SIZE
from lockstep.generation.cpu.torch_backend import TorchBackend
from lockstep.generation.engine import NativeRollout
from lockstep.generation.model_support import cache_shape
from lockstep.generation.scheduler import Scheduler
from lockstep.generation.stream import NativeStream
from lockstep.models.attention import CACHED
from lockstep.models.load import share_structure
from lockstep.models.lora import AdaptedLinear
from lockstep.workers.rollout.request import Completion, Job, Request, Tokens, TopLogProbs
from lockstep.workers.rollout.sampling import request_keys, sample, uniforms
from lockstep.workers.rollout.stream import Stream

_LOG_PROB = 2e-4
_BORDER = 1e-4
"""How far off the log-prob of an equal token, and the random number behind another token, may be."""


@dataclasses.dataclass(frozen=True)
class Whole(Request):
    """A request with all that came before it as its prompt."""

    position: int = 0
    """Tokens between the first prompt and the response: positions of random numbers count from there."""


@dataclasses.dataclass
class Played:
    """A request of a case and what came of it."""

    request: Whole
    own: int
    """How many of the prompt's tokens are the request's own."""
    completion: Completion
    pieces: list[Tokens] = dataclasses.field(default_factory=list)


def letters(ids: list[int]) -> str:
    """Text of tokens, one letter each."""
    return "".join(chr(65 + token) for token in ids)


# -- engines -------------------------------------------------------------------------------------------------------------------


class Soaked(NativeRollout):
    """The engine that is tried; its cache may be smaller than what is wanted."""

    room: int | None = None

    def _scheduler(self, wanted: int) -> Scheduler:
        if self.room is not None:
            wanted = min(wanted, 1 + -(-self.room // self.backend.page_size))
        return super()._scheduler(wanted)


class Plain(NativeRollout):
    """The plain engine: one pass after the other through the Hugging Face module, nothing kept from one request for another."""

    @property
    def backend(self) -> Any:  # type: ignore[override]
        if "_plain" not in vars(self):
            self._plain = TorchBackend(self.module, cache_shape(self.module, PAGE_SIZE), 0.5)
        return self._plain

    def _open_for(self, requests: Sequence[Request], sampling: SamplingParams) -> Stream:
        scheduler = self._scheduler_for(requests, sampling)
        return self._opened(_PlainStream(self, sampling, self.backend, scheduler, self._forget_stream))


class _PlainStream(NativeStream):
    """Random numbers count from where `Whole` says."""

    def _job(self, index: int, request: Request) -> Job | str:
        job = super()._job(index, request)
        if isinstance(job, Job) and isinstance(request, Whole):
            job.position = request.position
        return job


@cache
def _engine(kind: type[NativeRollout], family: str, invariant: bool, adapters: bool, device: str) -> Any:
    """An engine over its own module of the family."""
    model = tiny_model(family, **FAMILIES[family] | {"max_position_embeddings": CONTEXT, "tie_word_embeddings": False})
    with torch.no_grad():
        model.get_input_embeddings().weight[BAD] = torch.nan
        if adapters:
            _adapt(model)
    config = RolloutConfig(batch_invariant=invariant, gpu_memory_utilization=0.02)
    return kind(share_structure(model.to(device), CACHED), config, PAD, letters)


def _adapt(model: nn.Module) -> None:
    """Adapters that change what is drawn beside all linear layers but the last."""
    generator = torch.Generator().manual_seed(5)
    for name, linear in [(name, part) for name, part in model.named_modules() if isinstance(part, nn.Linear) and "layers" in name]:
        adapted = AdaptedLinear(linear, rank=4, scaling=1.5)
        for half in ("lora_A", "lora_B"):
            drawn = 0.2 * torch.randn(getattr(adapted, half).shape, generator=generator)
            setattr(adapted, half, nn.Parameter(drawn, requires_grad=False))
        parent, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(parent), attribute, adapted)


def engine_for(case: Case, device: str) -> Soaked:
    """The engine with the case's settings: one for all cases of a family, whose captured steps are worth keeping, but where the cache is
    small: that one starts anew."""
    settings = case.settings
    engine: Soaked = _engine(Soaked, case.family, settings.batch_invariant, case.adapters, device)
    engine.seats, engine.pass_tokens, engine.room = settings.max_num_seqs, settings.max_num_batched_tokens, case.room
    if case.room is not None:
        engine.sleep()
    return engine


def plain_for(case: Case) -> Plain:
    """The plain engine of the case's family."""
    engine: Plain = _engine(Plain, case.family, False, case.adapters, "cpu")
    engine.seats, engine.pass_tokens = 64, 512
    return engine


# -- playing -------------------------------------------------------------------------------------------------------------------


def play(engine: Soaked, case: Case) -> list[Played]:
    """What the engine answers. A request that continues one without a response is not asked."""
    if case.is_open:
        return _play_stream(engine, case)
    found = engine.generate([arrival.request for arrival in case.arrivals], case.params)
    wholes = [Whole(**_fields(arrival.request)) for arrival in case.arrivals]
    return [Played(whole, len(whole.prompt_ids), completion) for whole, completion in zip(wholes, found, strict=True)]


def _fields(request: Request) -> dict[str, Any]:
    return {field.name: getattr(request, field.name) for field in dataclasses.fields(Request)}


def _play_stream(engine: Soaked, case: Case) -> list[Played]:
    children = {place: [i for i, a in enumerate(case.arrivals) if a.parent == place] for place in range(len(case.arrivals))}
    due = {i: arrival.tick for i, arrival in enumerate(case.arrivals) if arrival.parent is None}
    """Arrival -> when it comes."""
    indices: dict[int, int] = {}
    """Arrival -> its index in the stream."""
    aborts: dict[int, int] = {}
    pieces: dict[int, list[Tokens]] = {}
    done: dict[int, Played] = {}
    tick = 0
    with engine.open(case.params, num_tokens=case.room) as stream:
        while due or len(done) < len(indices):
            for i in [i for i, at in due.items() if at <= tick]:
                arrival, _ = case.arrivals[i], due.pop(i)
                continues = None if arrival.parent is None else indices[arrival.parent]
                request = dataclasses.replace(arrival.request, keep=bool(children[i]), continues=continues)
                indices[i] = stream.add(request)
                if arrival.abort_after is not None:
                    aborts[i] = tick + arrival.abort_after
            for i in [i for i, at in aborts.items() if at <= tick]:
                del aborts[i]
                stream.abort(indices[i])
            answer, tick = stream.next(0.0), tick + 1
            if answer is None:
                continue
            place = next(i for i, index in indices.items() if index == answer.index)
            if isinstance(answer, Tokens):
                pieces.setdefault(place, []).append(answer)
                continue
            done[place] = _played(case, place, done, answer, pieces.get(place, []))
            if len(answer.ids):
                due |= {child: tick + case.arrivals[child].tick for child in children[place]}
    return [done[i] for i in sorted(done)]


def _played(case: Case, place: int, done: dict[int, Played], completion: Completion, pieces: list[Tokens]) -> Played:
    arrival = case.arrivals[place]
    ids, position = arrival.request.prompt_ids, 0
    if arrival.parent is not None:
        before = done[arrival.parent]
        position = before.request.position + len(before.completion.ids) + len(ids)
        ids = torch.cat([before.request.prompt_ids, before.completion.ids, ids])
    own, fields = len(arrival.request.prompt_ids), _fields(arrival.request) | {"prompt_ids": ids}
    return Played(Whole(**fields, position=position), own, completion, pieces)


# -- comparing -----------------------------------------------------------------------------------------------------------------


def expected(plain: Plain, case: Case, played: Sequence[Played]) -> list[Completion]:
    """The plain engine's answers. One that was aborted is asked for as many tokens as it has."""
    limits = [p.request.max_tokens if p.completion.finish_reason != "abort" else max(1, len(p.completion.ids)) for p in played]
    requests = [dataclasses.replace(p.request, max_tokens=limit, streams=False) for p, limit in zip(played, limits, strict=True)]
    return plain.generate(requests, case.params)


def compare(case: Case, played: Sequence[Played], answers: Sequence[Completion], plain: NativeRollout) -> Counter[str]:
    """How many responses are equal, differ after a border, or are wrong."""
    return Counter(_verdict(case, mine, theirs, plain) for mine, theirs in zip(played, answers, strict=True))


def _verdict(case: Case, played: Played, theirs: Completion, plain: NativeRollout) -> str:
    mine = played.completion
    if BAD in played.request.prompt_ids and mine.finish_reason == "error":
        return (
            "equal"  # where attention has a window, the kernel decides how far beyond it such a token is seen; theirs may see less
        )
    a, b = mine.ids.tolist(), theirs.ids.tolist()
    place = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    near = torch.allclose(mine.log_probs[:place], theirs.log_probs[:place], atol=_LOG_PROB, rtol=0) and _near_scores(
        played, theirs, place
    )
    if not near or not _pieces_fit(played):
        return "wrong"
    if mine.finish_reason == "abort" and not a:
        return "equal"
    reason = "length" if mine.finish_reason == "abort" else mine.finish_reason
    if a == b and (reason, mine.error) == (theirs.finish_reason, theirs.error):
        return "equal"
    if place < min(len(a), len(b)) and a[place] in neighbours(case, played.request, b[:place], plain):
        return "border"
    return "wrong"


def _pieces_fit(played: Played) -> bool:
    """All pieces together are the completion's tokens."""
    if not played.request.streams or played.completion.finish_reason == "error":
        return not played.pieces or played.request.streams
    return [token for piece in played.pieces for token in piece.ids.tolist()] == played.completion.ids.tolist()


def _near_scores(played: Played, theirs: Completion, place: int) -> bool:
    """Whether log-probs of the prompt, and of the most likely tokens before `place`, are theirs."""
    mine, request = played.completion, played.request
    if mine.error is not None or theirs.error is not None or (mine.finish_reason == "abort" and not len(mine.ids)):
        return True
    if request.prompt_log_probs:
        if mine.prompt_log_probs is None or theirs.prompt_log_probs is None:
            return False
        a, b = mine.prompt_log_probs, theirs.prompt_log_probs[-played.own :]
        if BAD in request.prompt_ids:  # how far it is seen among tokens that are computed together depends on the kernel
            b = torch.where(torch.isnan(a), a, torch.where(torch.isnan(b), a, b))
        if not torch.allclose(a, b, atol=_LOG_PROB, rtol=0, equal_nan=True):
            return False
    return not request.top_log_probs or _near_top(mine.top_log_probs, theirs.top_log_probs, place)


def _near_top(mine: TopLogProbs | None, theirs: TopLogProbs | None, place: int) -> bool:
    """Log-probs of the most likely tokens; which of two that are as likely comes first is not compared."""
    if mine is None or theirs is None:
        return False
    pairs = zip(mine[:place], theirs[:place], strict=True)
    return all(
        len(a) == len(b) and all(math.isclose(x, y, abs_tol=_LOG_PROB, rel_tol=0) for (_, x), (_, y) in zip(a, b, strict=True))
        for a, b in pairs
    )


@torch.no_grad()
def neighbours(case: Case, request: Whole, response: list[int], engine: NativeRollout) -> set[int]:
    """The tokens that a random number, a top-p and logits within _BORDER of the real ones would draw after `response`."""
    history = torch.cat([request.prompt_ids, torch.tensor(response, dtype=torch.int64)])
    params, generator = request.sampling or case.params, torch.Generator().manual_seed(len(response))
    exact = _logits(engine, history)
    logits = [exact, *(exact + _BORDER * torch.randn(exact.shape, generator=generator) for _ in range(8))]
    number = uniforms(request_keys(params.seed, [request.key]), torch.tensor([request.position + len(response)]))
    numbers = [(number + shift).clamp(0.0, 1.0 - 2**-24) for shift in (-_BORDER, 0.0, _BORDER)]
    top_ps = {params.top_p, min(1.0, params.top_p + _BORDER), params.top_p - _BORDER if params.top_p < 1.0 else 1.0}
    found = set()
    for one, uniform, top_p in itertools.product(logits, numbers, top_ps):
        token, _ = sample(one, uniform, params.temperature, params.top_k, top_p, params.min_p, params.repetition_penalty, [history])
        found.add(int(token))
    return found


def _logits(engine: NativeRollout, history: Tensor) -> Tensor:
    """[1, vocabulary] after these tokens, with transformers' own attention."""
    attention = engine.module.config._attn_implementation
    engine.module.set_attn_implementation("eager")
    logits = engine.module(input_ids=history[None], use_cache=False).logits[0, -1:].float()
    engine.module.set_attn_implementation(attention)
    return logits
