"""A NativeStream over a backend without a model, and what comes of requests that are added to it at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from types import SimpleNamespace
from typing import Any

from helpers.fake_model import VOCABULARY
from lockstep.config.sampling import SamplingParams
from lockstep.generation.backend import Backend
from lockstep.generation.scheduler import Scheduler
from lockstep.generation.stream import NativeStream
from lockstep.workers.rollout.request import Completion, DecodeText, Request


def fake_engine(decode_text: DecodeText | None = None, context: int | None = None) -> Any:
    """What a stream asks of its engine, and nothing else."""
    return SimpleNamespace(version=0, vocabulary=VOCABULARY, context=context, decode_text=decode_text, check_weights=lambda: None)


def generate(
    backend: Backend,
    scheduler: Scheduler,
    requests: Sequence[Request],
    params: SamplingParams,
    take_aborts: Callable[[], Set[int]] = set,
    decode_text: DecodeText | None = None,
) -> list[Completion]:
    """The completions of the requests, as they finish. `take_aborts` is asked before each pass."""
    with NativeStream(fake_engine(decode_text), params, backend, scheduler) as stream:
        stream._take_aborts = take_aborts  # type: ignore[method-assign]
        for request in requests:
            stream.add(request)
        return [answer for answer in stream if isinstance(answer, Completion)]
