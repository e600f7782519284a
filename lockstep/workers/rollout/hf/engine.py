"""HFRollout: transformers' own generate. Slow, and the standard that the native engine is compared with."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, PreTrainedModel

from lockstep.config.sampling import SamplingParams
from lockstep.errors import NumericalError
from lockstep.protocol import Ragged
from lockstep.workers.rollout.base import Completion, Request, RolloutEngine
from lockstep.workers.rollout.sampling import request_keys


class HFRollout(RolloutEngine):
    """See RolloutEngine. Randomness is seeded for each padded batch by its first request, so it depends on how requests are batched."""

    attention = "sdpa"

    def __init__(self, module: PreTrainedModel, max_num_seqs: int, pad_token_id: int) -> None:
        super().__init__(module, max_num_seqs, pad_token_id)
        # A folder's own settings (a repetition penalty, say) would change what is sampled behind the run's back.
        module.generation_config = GenerationConfig()

    @torch.no_grad()
    def generate(self, requests: Sequence[Request], sampling: SamplingParams) -> list[Completion]:
        completions = []
        for start in range(0, len(requests), self.max_num_seqs):
            completions += self._generate_batch(requests[start : start + self.max_num_seqs], sampling)
        return completions

    def _generate_batch(self, requests: Sequence[Request], sampling: SamplingParams) -> list[Completion]:
        device = self.module.device
        prompts = Ragged.from_rows([r.prompt_ids for r in requests])
        mask = prompts.like(torch.ones_like(prompts.values)).pad(0, side="left").to(device)
        options = (
            {"do_sample": True, "temperature": sampling.temperature, "top_k": max(sampling.top_k, 0), "top_p": sampling.top_p}
            if sampling.temperature
            else {"do_sample": False}
        )
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(int(request_keys(sampling.seed, [requests[0].key])[0]))
            out = self.module.generate(  # type: ignore[operator]  # a causal language model has it
                input_ids=prompts.pad(self.pad_token_id, side="left").to(device),
                attention_mask=mask,
                max_new_tokens=sampling.max_tokens,
                eos_token_id=list(sampling.stop_token_ids) or None,
                pad_token_id=self.pad_token_id,
                return_dict_in_generate=True,
                output_logits=True,
                logits_processor=LogitsProcessorList([_CheckFinite(requests)]),
                **options,
            )
        tokens = out.sequences[:, mask.shape[1] :]
        logits = torch.stack(out.logits, dim=1).float() / (sampling.temperature or 1.0)
        log_probs = logits.log_softmax(-1).gather(-1, tokens[..., None]).squeeze(-1)
        return [self._completion(*row, sampling) for row in zip(tokens.cpu(), log_probs.cpu(), strict=True)]

    def _completion(self, ids: Tensor, log_probs: Tensor, sampling: SamplingParams) -> Completion:
        stops = torch.isin(ids, torch.tensor(sampling.stop_token_ids, dtype=ids.dtype)).nonzero().flatten()
        length = int(stops[0]) + 1 if len(stops) else len(ids)
        return Completion(ids[:length], log_probs[:length], "stop" if len(stops) else "length", self.version)


class _CheckFinite(LogitsProcessor):
    """Looks at the logits before generate draws from them, which would fail without saying where."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self._requests = requests

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        bad = (~torch.isfinite(scores.float().logsumexp(-1))).nonzero().flatten().tolist()
        if bad:
            key = self._requests[bad[0]].key
            raise NumericalError(f"the model's logits are not finite for request {key} (step, prompt, sample)")
        return scores
