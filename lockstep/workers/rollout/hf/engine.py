"""HFRollout: transformers' own generate. Slow, and the standard that the native engine is compared with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from lockstep.config.sampling import SamplingParams
from lockstep.protocol import Ragged
from lockstep.workers.rollout.base import Completion, Numbered, Stopping, not_finite
from lockstep.workers.rollout.counted import request_keys
from lockstep.workers.rollout.kinds import ModuleRollout


class HFRollout(ModuleRollout):
    """See RolloutEngine. Randomness is seeded for each padded batch by its first request, so it depends on how requests are batched.

    Completions come a batch at a time. Every row of a batch runs as long as its longest, and is cut to its own limits afterwards.
    """

    attention = "sdpa"

    @torch.no_grad()
    def _serve(self, served: Sequence[Numbered], sampling: SamplingParams) -> Iterator[Completion]:
        # A folder's own settings (a repetition penalty, say) would change what is sampled behind the run's back.
        self.module.generation_config = GenerationConfig()
        for start in range(0, len(served), self.config.max_num_seqs):
            yield from self._generate_batch(served[start : start + self.config.max_num_seqs], sampling)

    def _generate_batch(self, numbered: Sequence[Numbered], sampling: SamplingParams) -> Iterator[Completion]:
        device, requests = self.module.device, [request for _, request in numbered]
        limits = [Stopping.of(request, sampling, self.context, self.decode_text) for request in requests]
        prompts = Ragged.from_rows([request.prompt_ids for request in requests])
        mask = prompts.like(torch.ones_like(prompts.values)).pad(0, side="left").to(device)
        finite = _CheckFinite(len(requests))
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(int(request_keys(sampling.seed, [requests[0].key])[0]))
            out = self.module.generate(  # type: ignore[operator]  # a causal language model has it
                input_ids=prompts.pad(self.pad_token_id, side="left").to(device),
                attention_mask=mask,
                max_new_tokens=max(limit.max_tokens for limit in limits),
                eos_token_id=_ends_all(limits),
                pad_token_id=self.pad_token_id,
                return_dict_in_generate=True,
                output_logits=True,
                logits_processor=LogitsProcessorList([finite]),
                **_options(sampling),
            )
        tokens = out.sequences[:, mask.shape[1] :]
        logits = torch.stack(out.logits, dim=1).float() / (sampling.temperature or 1.0)
        log_probs = logits.log_softmax(-1).gather(-1, tokens[..., None]).squeeze(-1)
        for row, ((index, request), limit) in enumerate(zip(numbered, limits, strict=True)):
            end = limit.end(tokens[row].tolist())
            assert end is not None, "transformers generated less than it was asked for"
            length, reason = end
            bad = finite.first_bad[row]
            if bad is not None and bad < length:
                yield not_finite(index, request, bad, self.version)
            else:
                yield Completion(index, tokens[row, :length].cpu(), log_probs[row, :length].cpu(), reason, self.version)


def _options(sampling: SamplingParams) -> dict[str, float | bool | int]:
    if not sampling.temperature:
        return {"repetition_penalty": sampling.repetition_penalty, "do_sample": False}
    names = ("repetition_penalty", "temperature", "top_p", "min_p")
    return {"do_sample": True, "top_k": max(sampling.top_k, 0)} | {name: getattr(sampling, name) for name in names}


def _ends_all(limits: Sequence[Stopping]) -> list[int] | None:
    """The stop tokens that every row has: transformers ends a row at them itself; the others are looked for afterwards."""
    return sorted(frozenset.intersection(*(limit.token_ids for limit in limits))) or None


class _CheckFinite(LogitsProcessor):
    """Notes the first token of each row whose logits are not finite, and lets generate go on: it would fail without saying where."""

    def __init__(self, rows: int) -> None:
        self.first_bad: list[int | None] = [None] * rows
        self._steps = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        bad = ~torch.isfinite(scores.float().logsumexp(-1))
        for row in bad.nonzero().flatten().tolist():
            self.first_bad[row] = self._steps if self.first_bad[row] is None else self.first_bad[row]
        self._steps += 1
        return scores.masked_fill(bad[:, None], 0.0)
