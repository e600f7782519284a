"""GPUGeneration: one call of the native engine on a GPU; the counterpart of `native/generation.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Rows

import torch

from lockstep.config.sampling import SamplingParams
from lockstep.workers.rollout.base import Completion, Request, Stopping, failed
from lockstep.workers.rollout.counted import request_keys
from lockstep.workers.rollout.native.generation import group_by_prompt
from lockstep.workers.rollout.native.gpu.backend import GPUBackend
from lockstep.workers.rollout.native.scheduler import Scheduler, Sequence


class GPUGeneration:
    """Serves `requests[index]` for the indices in `stopping`, which says when each response ends; they must all fit into the pool."""

    def __init__(
        self,
        backend: GPUBackend,
        scheduler: Scheduler,
        requests: Rows[Request],
        stopping: dict[int, Stopping],
        sampling: SamplingParams,
        version: int,
    ) -> None:
        self._backend, self._scheduler, self._requests, self._stopping = backend, scheduler, requests, stopping
        self._sampling, self._version = sampling, version
        scheduler.add(group_by_prompt(requests, stopping).values())

    def run(self, take_aborts: Callable[[], set[int]]) -> Iterator[Completion]:
        """Completions as they finish. `take_aborts` is asked before each interval which requests to end now."""
        keys = dict(enumerate(request_keys(self._sampling.seed, [request.key for request in self._requests]).tolist()))
        # The device looks for the tokens that end every response; the others are found when an interval is read.
        common = frozenset.intersection(*(limits.token_ids for limits in self._stopping.values()))
        ended = self._backend.run(self._scheduler, keys, self._sampling, common, self._find_stop, take_aborts)
        for sequence, reason in ended:
            yield self._completion(sequence, reason)

    def _find_stop(self, sequence: Sequence, start: int) -> int | None:
        limits = self._stopping[sequence.index]
        if not limits.token_ids and not limits.strings:
            return None
        for count in range(start + 1, len(sequence.tokens) + 1):
            if sequence.tokens[count - 1] < 0:
                return None  # not read yet
            if limits.reason(sequence.tokens[max(0, count - limits.window) : count], count) == "stop":
                return count
        return None

    def _completion(self, sequence: Sequence, reason: str) -> Completion:
        if reason == "error":
            place = len(sequence.tokens) - 1
            text = f"the model's logits are not finite at token {place} of the response"
            return failed(sequence.index, self._requests[sequence.index], text, self._version)
        return Completion(
            index=sequence.index,
            ids=torch.tensor(sequence.tokens, dtype=torch.int64),
            log_probs=torch.tensor(sequence.log_probs, dtype=torch.float32),
            finish_reason=reason,
            policy_version=self._version,
        )
