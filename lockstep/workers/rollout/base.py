"""RolloutEngine: token ids in, token ids and log-probs out. Text is seen only where a stop string is looked for."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from transformers import PretrainedConfig

from lockstep.config.actor_rollout_ref import RolloutConfig
from lockstep.config.sampling import SamplingParams
from lockstep.errors import ConfigError, NumericalError, WeightSyncError
from lockstep.protocol import DataProto, Ragged
from lockstep.utils.hf_config import context_limit
from lockstep.utils.printable import say
from lockstep.workers.rollout.request import MOST_TOP, Completion, DecodeText, Request
from lockstep.workers.weight_sync.base import Manifest, WeightOffer

if TYPE_CHECKING:
    from lockstep.workers.rollout.stream import Stream


@dataclass(frozen=True)
class Stopping:
    """When a response ends: after a stop token, after the token that completes a stop string, or at its limit."""

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
        """The request's own limits, and those of `sampling` where it has none; never more tokens than fit into `context` after the `length`
        (None: those of the prompt) before the response."""
        token_ids = sampling.stop_token_ids if request.stop_token_ids is None else request.stop_token_ids
        strings = sampling.stop if request.stop is None else request.stop
        limit = sampling.max_tokens if request.max_tokens is None else request.max_tokens
        limit = limit if context is None else min(limit, context - (len(request.prompt_ids) if length is None else length))
        return cls(limit, frozenset(token_ids), strings, decode_text)

    def end(self, tokens: Sequence[int], start: int = 0, stop: int | None = None) -> tuple[int, str] | None:
        """The length at which a response ends, and why ("stop" or "length"); None if it goes on.

        Only its tokens from `start` to `stop` (None: the last) are looked at: it is known that none before `start` ends it. What `tokens`
        has after the end does not matter."""
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


class RolloutEngine(ABC):
    """Generates from weights that somebody else keeps up to date.

    A request that cannot be served (see `_fault`), or whose logits are not finite, gets a Completion with finish_reason "error"; the
    others are not touched by it. Log-probs that the engine cannot give (`RolloutConfig.gives_log_probs`) are NaN.
    """

    def __init__(
        self, hf_config: PretrainedConfig, config: RolloutConfig, pad_token_id: int, decode_text: DecodeText | None = None
    ) -> None:
        self.hf_config, self.config, self.pad_token_id, self.decode_text = hf_config, config, pad_token_id, decode_text
        text_config = hf_config.get_text_config()
        self.vocabulary: int = text_config.vocab_size
        limit = context_limit(hf_config)
        self.context: int | None = None if limit is None else limit.tokens
        """How many tokens prompt and response may have together."""
        self.seats, self.pass_tokens, self.cache_share = config.seats, config.pass_tokens, config.cache_share
        self.version = 0
        """Counts the weights: whoever changes them adds one."""
        self._broken: str | None = None
        """Why the weights must not be used."""

    def receive(self, offer: WeightOffer, device: torch.device, receiver: int = 0) -> Manifest:
        """Replace all weights by the offer's; returns what the engine has now.

        Raises WeightSyncError when they are not whole and exactly what was sent. After any failure the engine refuses to generate, until a
        later call works.
        """
        self._broken = f"the update to version {offer.version} has not finished"
        try:
            manifest = self._load(offer, device, receiver)
        except BaseException as error:
            self._broken = f"the update to version {offer.version} failed: {str(error) or type(error).__name__}"
            raise
        self._broken, self.version = None, offer.version
        return manifest

    @abstractmethod
    def _load(self, offer: WeightOffer, device: torch.device, receiver: int) -> Manifest:
        """`receive`, without the bookkeeping."""

    def generate_stream(self, requests: Sequence[Request], sampling: SamplingParams) -> Iterator[Completion]:
        """One completion for each request, as they finish; `Completion.index` says which. Closing the iterator ends the generation.

        Raises WeightSyncError when the last weight update did not work, ConfigError for stop strings without a way to decode tokens.
        """
        self.check_weights()
        if self.decode_text is None and any(r.stop if r.stop is not None else sampling.stop for r in requests):
            raise ConfigError("stop strings need the tokenizer: make the rollout engine with decode_text")
        with self._open_for(requests, sampling) as stream:
            for request in requests:
                stream.add(request)
            for answer in stream:
                if isinstance(answer, Completion):
                    yield answer

    @abstractmethod
    def open(self, sampling: SamplingParams, *, num_tokens: int | None = None) -> Stream:
        """A stream whose requests can join, go on and leave while others run. Close it when it is over: an engine has one at a time.

        `sampling` is what a request without parameters of its own gets. `num_tokens`: how many tokens the key-value cache should hold
        (None: what memory allows). Raises WeightSyncError when the last weight update did not work, RuntimeError while another is open,
        ConfigError where the engine has none.
        """

    def _open_for(self, requests: Sequence[Request], sampling: SamplingParams) -> Stream:
        """A stream for these requests and no others."""
        return self.open(sampling)

    def check_weights(self) -> None:
        """Raise WeightSyncError when the last weight update did not work."""
        if self._broken is not None:
            raise WeightSyncError(f"the rollout has no whole set of weights, so it does not generate: {self._broken}")

    def generate(self, requests: Sequence[Request], sampling: SamplingParams) -> list[Completion]:
        """One completion for each request, in order."""
        finished = {completion.index: completion for completion in self.generate_stream(requests, sampling)}
        return [finished[index] for index in range(len(requests))]

    def check(self) -> None:
        """Raise ConfigError, naming the model's family and the reason, if this engine would compute the model wrongly."""
        return

    def sleep(self) -> None:
        """Give back the memory that only generation needs. The next generation takes it again by itself."""
        return

    def close(self) -> None:
        """End what the engine has started. May be called again."""
        return


def fault_of(
    request: Request, params: SamplingParams, length: int, vocabulary: int, context: int | None, decodes: bool
) -> str | None:
    """Why a model of this vocabulary and context length cannot serve the request, which has `length` tokens with what it continues; None
    if it can. `decodes`: whether there is a tokenizer for stop strings."""
    ids, limit, strings = request.prompt_ids, request.max_tokens, params.stop if request.stop is None else request.stop
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
    low, high = int(array.min()), int(array.max())
    if low < 0 or high >= vocabulary:
        wrong = low if low < 0 else high
        return f"the prompt has token {wrong}, the model knows 0 to {vocabulary - 1}: the tokenizer does not fit the model"
    if context is not None and length >= context:
        return f"the prompt has {length} tokens, the model's context holds {context}, one of them for the response"
    return None


def failed(index: int, request: Request, reason: str, version: int) -> Completion:
    """The completion of a request that has no response."""
    error = f"request {request.key} (step, prompt, sample): {reason}"
    return Completion(index, torch.empty(0, dtype=torch.int64), torch.empty(0), "error", version, error)


def not_finite(index: int, request: Request, token: int, version: int) -> Completion:
    """The completion of a request whose logits are not finite at a token."""
    return failed(index, request, f"the model's logits are not finite at token {token} of the response", version)


# -- rows of a batch -----------------------------------------------------------------------------------------------------------


def requests_of(prompts: DataProto, step: int) -> list[Request]:
    """A request for each row, from its columns prompts, index, sample."""
    ids, columns = prompts.ragged("prompts").rows(), prompts.non_tensor_batch
    return [
        Request(prompt_ids, (step, int(index), int(sample)))
        for prompt_ids, index, sample in zip(ids, columns["index"], columns["sample"], strict=True)
    ]


def response_columns(completions: Sequence[Completion]) -> DataProto:
    """The columns responses, rollout_log_probs, response_mask, finish_reason, and experts where they are kept. A request that failed has an
    empty response, and a line on standard output says so. Raises NumericalError when all of them failed."""
    failures = [completion.error for completion in completions if completion.error]
    if failures:
        say(f"{len(failures)} of {len(completions)} requests have no response; the first: {failures[0]}", flush=True)
    if len(failures) == len(completions) > 0:
        raise NumericalError(f"no request of the batch has a response; the first: {failures[0]}")
    responses = Ragged.from_rows([c.ids for c in completions], dtype=torch.int64)
    columns = {
        "responses": responses,
        "rollout_log_probs": Ragged.from_rows([c.log_probs for c in completions], dtype=torch.float32),
        "response_mask": responses.like(torch.ones_like(responses.values)),
    }
    if any(c.experts is not None for c in completions):
        columns["experts"] = Ragged.from_rows([() if c.experts is None else c.experts for c in completions], dtype=torch.int16)
    return DataProto.from_dict(columns, {"finish_reason": [c.finish_reason for c in completions]})
