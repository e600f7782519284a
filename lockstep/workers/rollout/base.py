"""RolloutEngine: token ids in, token ids and log-probs out. Text is never seen here."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lockstep.config.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class Request:
    """One response to generate."""

    prompt_ids: Tensor
    """[P] int64, P at least 1."""
    key: tuple[int, int, int]
    """(step, prompt, sample): with the run's seed and the position it decides the random number behind each token."""


@dataclass(frozen=True, slots=True)
class Completion:
    """One response."""

    ids: Tensor
    """[T] int64, with the stop token when there was one."""
    log_probs: Tensor
    """[T] float32: log-prob of each token under the whole distribution at the sampling temperature (at 1 when greedy)."""
    finish_reason: str
    """"stop" or "length"."""
    policy_version: int
    """Which weights wrote it."""


class RolloutEngine(ABC):
    """Generates from `module`, a plain Hugging Face causal language model whose parameters somebody else keeps up to date."""

    attention: str
    """The attention function the module must be built with."""

    def __init__(self, module: PreTrainedModel, max_num_seqs: int, pad_token_id: int) -> None:
        self.module, self.max_num_seqs, self.pad_token_id = module, max_num_seqs, pad_token_id
        self.version = 0
        """Counts the weights: whoever changes them adds one."""

    @abstractmethod
    @torch.no_grad()
    def generate(self, requests: Sequence[Request], sampling: SamplingParams) -> list[Completion]:
        """One completion for each request, in order. Raises NumericalError, naming the request, when logits are not finite."""

    def generate_stream(self, requests: Sequence[Request], sampling: SamplingParams) -> Iterator[tuple[int, Completion]]:
        """The completions with the positions of their requests, each as soon as it is finished, in any order."""
        yield from enumerate(self.generate(requests, sampling))
