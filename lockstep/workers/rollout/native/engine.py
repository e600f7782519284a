"""NativeRollout: a slot is refilled as soon as its sequence ends, so short responses never wait for long ones."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from lockstep.config.sampling import SamplingParams
from lockstep.errors import NumericalError
from lockstep.models.attention import CACHED, PackedLayout
from lockstep.workers.rollout.base import Completion, Request, RolloutEngine
from lockstep.workers.rollout.native.cache import SlotCache
from lockstep.workers.rollout.sampling import request_keys, sample, uniforms


class NativeRollout(RolloutEngine):
    """See RolloutEngine. Prompts are prefilled packed; running sequences are decoded together, one token a pass."""

    attention = CACHED

    @torch.no_grad()
    def generate(self, requests: Sequence[Request], sampling: SamplingParams) -> list[Completion]:
        if not requests:
            return []
        batch = _Batch(self, requests, sampling)
        while batch.waiting or batch.running:
            if batch.waiting and batch.free:
                batch.prefill()
            if batch.running:
                batch.decode()
        return batch.completions()


class _Batch:
    """The state of one `generate` call. Rows are requests; slots are places in the cache."""

    def __init__(self, engine: NativeRollout, requests: Sequence[Request], sampling: SamplingParams) -> None:
        self.module, self.device, self.version = engine.module, engine.module.device, engine.version
        self.requests, self.sampling = requests, sampling
        slots = min(engine.max_num_seqs, len(requests))
        longest = max(len(r.prompt_ids) for r in requests)
        self.cache = SlotCache(slots, longest + sampling.max_tokens)
        self.waiting = deque(range(len(requests)))
        self.free = list(range(slots))
        self.running: list[tuple[int, int]] = []
        """(request, slot)"""
        self.keys = request_keys(sampling.seed, [r.key for r in requests])
        self.tokens: list[list[int]] = [[] for _ in requests]
        self.log_probs: list[list[float]] = [[] for _ in requests]
        self.stop = set(sampling.stop_token_ids)

    def prefill(self) -> None:
        """Give free slots to waiting requests and sample the first token of each."""
        count = min(len(self.free), len(self.waiting))
        admitted = [(self.waiting.popleft(), self.free.pop(0)) for _ in range(count)]
        prompts = [self.requests[row].prompt_ids for row, _ in admitted]
        lengths = torch.tensor([len(p) for p in prompts])
        layout = PackedLayout(lengths, self.device)
        slots = torch.tensor([slot for _, slot in admitted])
        self.cache.begin_prefill(slots.to(self.device), lengths.to(self.device), layout)
        positions = torch.cat([torch.arange(len(p)) for p in prompts])
        last = (torch.cumsum(lengths, 0) - 1).to(self.device)
        logits = self._forward(torch.cat(prompts)[None], positions[None], logits_to_keep=last)[0]
        self._sample(admitted, logits)

    def decode(self) -> None:
        """One more token for every running request."""
        rows = [row for row, _ in self.running]
        slots = torch.tensor([slot for _, slot in self.running], device=self.device)
        positions = torch.tensor([len(self.requests[row].prompt_ids) + len(self.tokens[row]) - 1 for row in rows])
        last_tokens = torch.tensor([self.tokens[row][-1] for row in rows])
        self.cache.begin_decode(slots, positions.to(self.device))
        logits = self._forward(last_tokens[:, None], positions[:, None])[:, 0]
        running, self.running = self.running, []
        self._sample(running, logits)

    def completions(self) -> list[Completion]:
        return [
            Completion(
                ids=torch.tensor(tokens, dtype=torch.int64),
                log_probs=torch.tensor(log_probs, dtype=torch.float32),
                finish_reason="stop" if tokens and tokens[-1] in self.stop else "length",
                policy_version=self.version,
            )
            for tokens, log_probs in zip(self.tokens, self.log_probs, strict=True)
        ]

    def _forward(self, input_ids: Tensor, position_ids: Tensor, **kwargs: Tensor) -> Tensor:
        out = self.module(
            input_ids=input_ids.to(self.device),
            position_ids=position_ids.to(self.device),
            use_cache=False,
            kv_cache=self.cache,
            **kwargs,
        )
        return out.logits

    def _sample(self, sequences: list[tuple[int, int]], logits: Tensor) -> None:
        """Append a token to each sequence; those that end give their slot back."""
        rows = torch.tensor([row for row, _ in sequences])
        positions = torch.tensor([len(self.tokens[row]) for row, _ in sequences])
        uniform = uniforms(self.keys[rows], positions).to(self.device)
        tokens, log_probs = sample(logits, uniform, self.sampling.temperature, self.sampling.top_k, self.sampling.top_p)
        for (row, slot), token, log_prob in zip(sequences, tokens.tolist(), log_probs.tolist(), strict=True):
            if not math.isfinite(log_prob):
                raise NumericalError(
                    f"the model's logits are not finite for request {self.requests[row].key} (step, prompt, sample)"
                )
            self.tokens[row].append(token)
            self.log_probs[row].append(log_prob)
            if token in self.stop or len(self.tokens[row]) == self.sampling.max_tokens:
                self.free.append(slot)
            else:
                self.running.append((row, slot))
