"""RolloutEngine: token ids in, token ids and log-probs out, over a module of this process or in a separate process.

Text is read only to find stop strings.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from transformers import PretrainedConfig, PreTrainedModel

from lockstep.config.actor_rollout_ref import RolloutConfig
from lockstep.config.engine import ModelConfig
from lockstep.config.sampling import SamplingParams
from lockstep.errors import ConfigError, NumericalError, WeightSyncError
from lockstep.models.hf_config import context_limit, read_model_config
from lockstep.models.source import model_folder
from lockstep.protocol import DataProto, Ragged
from lockstep.utils.terminal import say
from lockstep.workers.rollout.request import Completion, DecodeText, Job, Request, TopLogProbs, not_finite
from lockstep.workers.weight_sync.base import Manifest, WeightOffer, check_equal, copy_weights, module_manifest, received

if TYPE_CHECKING:
    from lockstep.workers.rollout.stream import Stream


class RolloutEngine(ABC):
    """Generates; the worker keeps its weights up to date.

    A request that cannot be served (see `fault_of`), or whose logits are not finite, gets a Completion with finish_reason "error"; other
    requests are not affected. Log-probs that the engine cannot give (`RolloutConfig.gives_log_probs`) are NaN.
    """

    def __init__(
        self, hf_config: PretrainedConfig, config: RolloutConfig, pad_token_id: int, decode_text: DecodeText | None = None
    ) -> None:
        self.hf_config = hf_config
        self.config = config
        self.pad_token_id = pad_token_id
        self.decode_text = decode_text
        text_config = hf_config.get_text_config()
        self.vocabulary: int = text_config.vocab_size
        limit = context_limit(hf_config)
        self.context: int | None = None if limit is None else limit.tokens
        """Most tokens of prompt and response together; None: no limit."""
        self.seats = config.seats
        self.pass_tokens = config.pass_tokens
        self.cache_share = config.cache_share
        self.version = 0
        """Counts the weights: every change adds one."""
        self._broken: str | None = None
        """Why the weights must not be used; None if they may."""

    def receive(self, offer: WeightOffer, device: torch.device, receiver: int = 0) -> Manifest:
        """Replace all weights by the offer's. Return the manifest of the new weights.

        Raise WeightSyncError unless they are whole and exactly the sent ones. After any failure the engine refuses to generate until a
        later call works.
        """
        self._broken = f"the update to version {offer.version} has not finished"
        try:
            manifest = self._load(offer, device, receiver)
        except BaseException as error:
            self._broken = f"the update to version {offer.version} failed: {str(error) or type(error).__name__}"
            raise
        self._broken = None
        self.version = offer.version
        return manifest

    @abstractmethod
    def _load(self, offer: WeightOffer, device: torch.device, receiver: int) -> Manifest:
        """`receive`, without the bookkeeping."""

    def generate_stream(self, requests: Sequence[Request], sampling: SamplingParams) -> Iterator[Completion]:
        """Yield one completion for each request (`Completion.index`), as they finish. Closing the iterator ends the generation.

        Raise WeightSyncError if the last weight update failed, ConfigError for stop strings without a tokenizer.
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
        """Return a stream whose requests can join, continue and leave while others run. Close it: an engine has one at a time.

        `sampling` is for requests without their own parameters. `num_tokens`: how many tokens the key-value cache should hold (None: as
        many as memory allows). Raise WeightSyncError if the last weight update failed, RuntimeError while another stream is open,
        ConfigError if the engine has no streams.
        """

    def _open_for(self, requests: Sequence[Request], sampling: SamplingParams) -> Stream:
        """Return a stream for these requests alone."""
        return self.open(sampling)

    def check_weights(self) -> None:
        """Raise WeightSyncError if the last weight update failed."""
        if self._broken is not None:
            raise WeightSyncError(f"the rollout has no whole set of weights, so it does not generate: {self._broken}")

    def generate(self, requests: Sequence[Request], sampling: SamplingParams) -> list[Completion]:
        """Return one completion for each request, in order."""
        finished = {completion.index: completion for completion in self.generate_stream(requests, sampling)}
        return [finished[index] for index in range(len(requests))]

    def check(self) -> None:
        """Raise ConfigError, with the model's family and the reason, if this engine would compute the model wrongly."""
        return

    def sleep(self) -> None:
        """Free the memory that only generation needs. The next generation allocates it again."""
        return

    def close(self) -> None:
        """End the engine's processes. May be called again."""
        return


# -- rows of a batch -----------------------------------------------------------------------------------------------------------


def requests_of(prompts: DataProto, step: int) -> list[Request]:
    """Return a request for each row, from its columns prompts, index, sample."""
    ids = prompts.ragged("prompts").rows()
    columns = prompts.non_tensor_batch
    return [
        Request(prompt_ids, (step, int(index), int(sample)))
        for prompt_ids, index, sample in zip(ids, columns["index"], columns["sample"], strict=True)
    ]


def response_columns(completions: Sequence[Completion]) -> DataProto:
    """Return the columns responses, rollout_log_probs, response_mask, finish_reason, and experts if they are kept.

    A failed request has an empty response; one line on standard output counts them. Raise NumericalError if all of them failed.
    """
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


class ModuleRollout(RolloutEngine):
    """An engine over `module`, a plain Hugging Face causal language model in this process."""

    attention: str
    """The attention function the module must be built with."""
    own_weights: bool = True
    """Whether no trainer shares the module's parameters: then the engine may move them, as long as they are updated in place."""

    def __init__(
        self, module: PreTrainedModel, config: RolloutConfig, pad_token_id: int, decode_text: DecodeText | None = None
    ) -> None:
        super().__init__(module.config, config, pad_token_id, decode_text)
        self.module = module

    @torch.no_grad()
    def _load(self, offer: WeightOffer, device: torch.device, receiver: int) -> Manifest:
        weights = received(offer, device, receiver)
        copy_weights(self.module, weights)
        manifest = module_manifest(self.module, weights.manifest)
        check_equal(weights.manifest, manifest)
        return manifest


class ProcessRollout(RolloutEngine):
    """An engine that generates in a separate process, with its own weights.

    It starts with the weights of the model's folder and computes in `dtype`. Raises what `_start` raises, WorkerDied and WorkerTimeout
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
        hf_config = read_model_config(str(model.path), model.trust_remote_code, **model.override_config)
        super().__init__(hf_config, config, pad_token_id, decode_text)
        self.folder = os.path.abspath(model_folder(str(model.path)))
        self._start(model, device, str(dtype).removeprefix("torch."))

    @abstractmethod
    def _start(self, model: ModelConfig, device: torch.device, dtype: str) -> None:
        """Start the process with the model of `self.folder`."""

    def completed(
        self, job: Job, ids: Sequence[int], log_probs: Sequence[float], reason: str, tops: TopLogProbs | None = None
    ) -> Completion:
        """Return the completion of a job from the process's answer; log-probs that are not finite make it an error."""
        values = torch.tensor(log_probs, dtype=torch.float32)
        bad = (~torch.isfinite(values)).nonzero().flatten().tolist()
        if bad:
            return not_finite(job.index, job.request, bad[0], self.version)
        if not self.gives_log_probs(job.params):
            values = torch.full_like(values, torch.nan)
            tops = None
        return Completion(job.index, torch.tensor(ids, dtype=torch.int64), values, reason, self.version, None, tops)

    def gives_log_probs(self, params: SamplingParams) -> bool:
        """See RolloutConfig.gives_log_probs."""
        return self.config.gives_log_probs(params.temperature, params.truncates, params.penalises)
