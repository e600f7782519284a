"""What is asked of an engine and what it answers: records, no code."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from lockstep.config.sampling import SamplingParams

if TYPE_CHECKING:
    from lockstep.workers.rollout.base import Stopping

DecodeText = Callable[[list[int]], str]
"""Token ids -> text, special tokens included."""
MOST_TOP = 20
"""How many of the most likely tokens a request can ask for."""
TopLogProbs = list[list[tuple[int, float]]]
"""At each place the most likely tokens and their log-probs, the likeliest first."""


@dataclass(frozen=True)
class Request:
    """One response to generate. The limits are those of its sampling parameters where they are None."""

    prompt_ids: Tensor
    """[P] int64, P at least 1. With `continues`: what comes after that request's prompt and response."""
    key: tuple[int, int, int]
    """(step, prompt, sample): with the seed and the position it decides the random number behind each token."""
    max_tokens: int | None = None
    """Longest response."""
    stop_token_ids: tuple[int, ...] | None = None
    """The response ends after one of these."""
    stop: tuple[str, ...] | None = None
    """The response ends after the token that completes one of these strings."""
    sampling: SamplingParams | None = None
    """How its tokens are drawn; None: as the call or the stream says."""
    streams: bool = False
    """Whether its tokens are delivered as they are drawn (`Tokens`), beside its completion."""
    top_log_probs: int = 0
    """How many of the most likely tokens have their log-probs in the answer, at each place; at most MOST_TOP."""
    prompt_log_probs: bool = False
    """Whether the prompt's tokens have theirs."""
    keep: bool = False
    """Whether another request may continue it: its tokens stay known to the stream until `release`, and their keys and values in the
    cache until then, or until pages are short or the weights change."""
    continues: int | None = None
    """A request of this stream that has finished and was added with `keep`: this one goes on after its response. Positions count on."""


@dataclass(frozen=True)
class Completion:
    """One response, or why there is none."""

    index: int
    """Which request of the call it answers."""
    ids: Tensor
    """[T] int64, with the stop token, or the tokens of the stop string, when there was one. Empty after an error."""
    log_probs: Tensor
    """[T] float32: log-prob of each token under the whole distribution at the sampling temperature (at 1 when greedy)."""
    finish_reason: str
    """"stop", "length", "abort" (has the tokens up to then) or "error"."""
    policy_version: int
    """Which weights wrote it."""
    error: str | None = None
    """What was wrong, with the request's key; only with finish_reason "error"."""
    top_log_probs: TopLogProbs | None = None
    """[T], where asked for: by the same rule as `log_probs`."""
    prompt_log_probs: Tensor | None = None
    """[P] float32, where asked for; NaN for a token that nothing comes before."""
    prompt_top_log_probs: TopLogProbs | None = None
    """[P], where both are asked for; empty where `prompt_log_probs` is NaN."""
    experts: Tensor | None = None
    """[P + T, layers * experts per token] int16, where they are kept (native/routed.py): what routers chose for each token; -1: unknown."""


@dataclass(frozen=True)
class Tokens:
    """A piece of a response that is not finished, for a request with `streams`. All pieces together are the completion's tokens."""

    index: int
    ids: Tensor
    """[T] int64"""
    log_probs: Tensor
    """[T] float32"""
    top_log_probs: TopLogProbs | None = None
    """[T], where asked for."""


@dataclass(slots=True, eq=False)
class Job:
    """A request that is being served."""

    index: int
    request: Request
    params: SamplingParams
    ids: Tensor
    """[all tokens before the response] int64: the request's prompt, and before it what it continues."""
    limits: Stopping
    position: int = 0
    """Tokens between the first prompt and this response: positions of random numbers count from there."""
    num_sent: int = 0
    """Tokens that were delivered."""
    version: int = 0
    """Of the weights that drew its first token."""


@dataclass(frozen=True)
class Turn:
    """What a kept request leaves for those that continue it."""

    ids: Tensor
    """[prompt and response] int64"""
    position: int
    """How many of them come after the first prompt."""
