"""A request to a rollout engine, when its response ends, and the answers: a completion, a piece of one, or an error."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.config.sampling import SamplingParams

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
    """[P + T, layers * experts per token] int16, where they are kept (generation/routing.py): the choice of the routers for each token;
    -1: unknown."""


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
class KeptRequest:
    """What a kept request leaves for those that continue it."""

    ids: Tensor
    """[prompt and response] int64"""
    position: int
    """How many of them come after the first prompt."""


@dataclass(frozen=True)
class Stopping:
    """The conditions that end a response: a stop token, the token that completes a stop string, or the limit."""

    max_tokens: int
    token_ids: frozenset[int]
    strings: tuple[str, ...]
    decode_text: DecodeText | None

    @classmethod
    def of(
        cls,
        request: Request,
        sampling: SamplingParams,
        context: int | None,
        decode_text: DecodeText | None,
        length: int | None = None,
    ) -> Stopping:
        """Return the request's limits, or else those of `sampling`; never more tokens than fit into `context`.

        `length` is the number of tokens before the response (None: the prompt's).
        """
        token_ids = sampling.stop_token_ids if request.stop_token_ids is None else request.stop_token_ids
        strings = sampling.stop if request.stop is None else request.stop
        limit = sampling.max_tokens if request.max_tokens is None else request.max_tokens
        limit = limit if context is None else min(limit, context - (len(request.prompt_ids) if length is None else length))
        return cls(limit, frozenset(token_ids), strings, decode_text)

    def end(self, tokens: Sequence[int], start: int = 0, stop: int | None = None) -> tuple[int, str] | None:
        """Return the length at which a response ends, and the reason ("stop" or "length"); None if it continues.

        Only the tokens from `start` to `stop` (None: the last) are examined: no token before `start` ends the response. Tokens after the
        end do not matter.
        """
        stop = len(tokens) if stop is None else stop
        if not self.token_ids and not self.strings:
            return (self.max_tokens, "length") if stop >= self.max_tokens else None
        if not self.strings and self.token_ids.isdisjoint(tokens[start:stop]):  # as nearly always
            return (max(start + 1, self.max_tokens), "length") if start < stop >= self.max_tokens else None
        for length in range(start + 1, stop + 1):
            if tokens[length - 1] in self.token_ids or (self.strings and self._completes_a_string(tokens, length)):
                return length, "stop"
            if length >= self.max_tokens:
                return length, "length"
        return None

    def _completes_a_string(self, tokens: Sequence[int], length: int) -> bool:
        assert self.decode_text is not None
        # A character has at most 4 bytes, and a token at least one of them or is special: earlier tokens cannot matter.
        window = 4 * max(map(len, self.strings)) + 8
        text = self.decode_text(list(tokens[max(0, length - window) : length]))
        return any(string in text for string in self.strings)


def fault_of(
    request: Request, params: SamplingParams, length: int, vocabulary: int, context: int | None, decodes: bool
) -> str | None:
    """Return why a model of this vocabulary and context length cannot serve the request; None if it can.

    `length` counts the request's tokens and those it continues. `decodes`: whether there is a tokenizer for stop strings.
    """
    ids = request.prompt_ids
    limit = request.max_tokens
    strings = params.stop if request.stop is None else request.stop
    if not len(ids):
        return "the prompt is empty; it needs one token or more"
    if limit is not None and limit < 1:
        return f"max_tokens={limit}; it must be at least 1"
    if "" in strings:
        return "one of its stop strings is empty"
    if strings and not decodes:
        return "stop strings need the tokenizer: make the rollout engine with decode_text"
    if not 0 <= request.top_log_probs <= MOST_TOP:
        return f"top_log_probs={request.top_log_probs}; it must be between 0 and {MOST_TOP}"
    array = ids.numpy()  # a few times faster than the tensor where it is short
    low = int(array.min())
    high = int(array.max())
    if low < 0 or high >= vocabulary:
        wrong = low if low < 0 else high
        return f"the prompt has token {wrong}, the model knows 0 to {vocabulary - 1}: the tokenizer does not fit the model"
    if context is not None and length >= context:
        return f"the prompt has {length} tokens, the model's context holds {context}, one of them for the response"
    return None


def failed(index: int, request: Request, reason: str, version: int) -> Completion:
    """Return the completion of a request without a response."""
    error = f"request {request.key} (step, prompt, sample): {reason}"
    return Completion(index, torch.empty(0, dtype=torch.int64), torch.empty(0), "error", version, error)


def not_finite(index: int, request: Request, token: int, version: int) -> Completion:
    """Return the completion of a request whose logits are not finite at a token."""
    return failed(index, request, f"the model's logits are not finite at token {token} of the response", version)
