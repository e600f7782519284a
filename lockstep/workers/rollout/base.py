"""RolloutEngine: token ids in, token ids and log-probs out. Text is seen only where a stop string is looked for."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from lockstep.config.actor_rollout_ref import RolloutConfig
from lockstep.config.engine import ModelConfig
from lockstep.config.sampling import SamplingParams
from lockstep.errors import ConfigError, WeightSyncError
from lockstep.utils.hf_config import read_model_config
from lockstep.utils.model_source import model_folder
from lockstep.workers.weight_sync.base import Manifest, WeightOffer, check_equal, opened
from lockstep.workers.weight_sync.module import copy_weights, module_manifest

DecodeText = Callable[[list[int]], str]
"""Token ids -> text, special tokens included."""


@dataclass(frozen=True, slots=True)
class Request:
    """One response to generate. The limits are the call's where they are None."""

    prompt_ids: Tensor
    """[P] int64, P at least 1."""
    key: tuple[int, int, int]
    """(step, prompt, sample): with the run's seed and the position it decides the random number behind each token."""
    max_tokens: int | None = None
    """Longest response."""
    stop_token_ids: tuple[int, ...] | None = None
    """The response ends after one of these."""
    stop: tuple[str, ...] | None = None
    """The response ends after the token that completes one of these strings."""


@dataclass(frozen=True, slots=True)
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


class RolloutEngine(ABC):
    """Generates from weights that somebody else keeps up to date.

    A request that cannot be served (see `find_fault`), or whose logits are not finite, gets a Completion with finish_reason "error"; the
    others are not touched by it. Log-probs that the engine cannot give (`RolloutConfig.gives_log_probs`) are NaN.
    """

    hf_config: PretrainedConfig
    """The model's config."""

    def __init__(self, config: RolloutConfig, pad_token_id: int, decode_text: DecodeText | None = None) -> None:
        self.config, self.pad_token_id, self.decode_text = config, pad_token_id, decode_text
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

    @abstractmethod
    def generate_stream(self, requests: Sequence[Request], sampling: SamplingParams) -> Iterator[Completion]:
        """One completion for each request, as they finish; `Completion.index` says which. Closing the iterator ends the generation."""

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

    def _faults(self, requests: Sequence[Request], sampling: SamplingParams) -> dict[int, Completion]:
        """Completions of the requests that cannot be served.

        Every generation begins here. Raises WeightSyncError when the last weight update did not work, ConfigError for stop strings without
        a way to decode tokens.
        """
        if self._broken is not None:
            raise WeightSyncError(f"the rollout has no whole set of weights, so it does not generate: {self._broken}")
        if self.decode_text is None and any(r.stop if r.stop is not None else sampling.stop for r in requests):
            raise ConfigError("stop strings need the tokenizer: make the rollout engine with decode_text")
        config = self.hf_config.get_text_config()
        found = {}
        for index, request in enumerate(requests):
            fault = find_fault(request, sampling, config.vocab_size, getattr(config, "max_position_embeddings", None))
            if fault is not None:
                found[index] = failed(index, request, fault, self.version)
        return found


class ModuleRollout(RolloutEngine):
    """An engine over `module`, a plain Hugging Face causal language model in this process."""

    attention: str
    """The attention function the module must be built with."""
    own_weights: bool = True
    """Whether the module's parameters are nobody else's tensors: then the engine may move them, as long as they are updated in place."""

    def __init__(
        self, module: PreTrainedModel, config: RolloutConfig, pad_token_id: int, decode_text: DecodeText | None = None
    ) -> None:
        super().__init__(config, pad_token_id, decode_text)
        self.module, self.hf_config = module, module.config

    @torch.no_grad()
    def _load(self, offer: WeightOffer, device: torch.device, receiver: int) -> Manifest:
        with opened(offer, device, receiver) as weights:
            copy_weights(self.module, weights)
        manifest = module_manifest(self.module, weights.manifest)
        check_equal(weights.manifest, manifest)
        return manifest


class ProcessRollout(RolloutEngine):
    """An engine that generates in a process of its own (process.py), with weights of its own.

    It starts with those of the model's folder and computes in `dtype`. Raises what `_start` raises, WorkerDied and WorkerTimeout
    (`config.start_timeout_s`, `config.silence_timeout_s`).
    """

    def __init__(
        self,
        model: ModelConfig,
        config: RolloutConfig,
        pad_token_id: int,
        device: torch.device,
        dtype: torch.dtype,
        decode_text: DecodeText | None = None,
    ) -> None:
        super().__init__(config, pad_token_id, decode_text)
        self.hf_config = read_model_config(str(model.path), model.trust_remote_code, **model.override_config)
        self.folder = os.path.abspath(model_folder(str(model.path)))
        self._start(model, device, str(dtype).removeprefix("torch."))

    @abstractmethod
    def _start(self, model: ModelConfig, device: torch.device, dtype: str) -> None:
        """Start the process with the model of `self.folder`."""

    def _completion(
        self, index: int, request: Request, ids: Sequence[int], log_probs: Sequence[float], reason: str, sampling: SamplingParams
    ) -> Completion:
        """What the process answered to a request; the log-probs say whether the logits were finite."""
        values = torch.tensor(log_probs, dtype=torch.float32)
        bad = (~torch.isfinite(values)).nonzero().flatten().tolist()
        if bad:
            return failed(index, request, f"the model's logits are not finite at token {bad[0]} of the response", self.version)
        if not self.config.gives_log_probs(sampling.temperature, sampling.truncates, sampling.repetition_penalty != 1.0):
            values = torch.full_like(values, torch.nan)
        return Completion(index, torch.tensor(ids, dtype=torch.int64), values, reason, self.version)


def find_fault(request: Request, sampling: SamplingParams, vocabulary: int, context: int | None) -> str | None:
    """Why a model of this vocabulary and context length cannot serve the request; None if it can."""
    ids, limit = request.prompt_ids, request.max_tokens
    if not len(ids):
        return "the prompt is empty; it needs one token or more"
    if limit is not None and limit < 1:
        return f"max_tokens={limit}; it must be at least 1"
    if request.stop is not None and "" in request.stop:
        return "one of its stop strings is empty"
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocabulary:
        wrong = low if low < 0 else high
        return f"the prompt has token {wrong}, the model knows 0 to {vocabulary - 1}: the tokenizer does not fit the model"
    if context is not None and len(ids) >= context:
        return f"the prompt has {len(ids)} tokens, the model's context holds {context}, one of them for the response"
    return None


def failed(index: int, request: Request, reason: str, version: int) -> Completion:
    """The completion of a request that has no response."""
    error = f"request {request.key} (step, prompt, sample): {reason}"
    return Completion(index, torch.empty(0, dtype=torch.int64), torch.empty(0), "error", version, error)


def longest_response(request: Request, sampling: SamplingParams, context: int | None) -> int:
    """How many tokens the response may have: the request's limit, else the call's, and no more than the context has room for."""
    limit = sampling.max_tokens if request.max_tokens is None else request.max_tokens
    return limit if context is None else min(limit, context - len(request.prompt_ids))
