"""Requests become samples of a scheduler, and samples that have ended become completions. The device between them is a Backend."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from lockstep.config.sampling import SamplingParams
from lockstep.workers.rollout.base import Completion, Request, Stopping, not_finite
from lockstep.workers.rollout.counted import request_keys
from lockstep.workers.rollout.native.backend import Backend, TakeAborts
from lockstep.workers.rollout.native.scheduler import Prompt, Sample, Scheduler

Requests = Sequence[Request] | Mapping[int, Request]
"""Requests by their places in the call."""


def generate(
    backend: Backend,
    scheduler: Scheduler,
    requests: Requests,
    limits: dict[int, Stopping],
    sampling: SamplingParams,
    version: int,
    take_aborts: TakeAborts = set,
) -> Iterator[Completion]:
    """Completions of `requests[index]` for the indices in `limits`, which says when each response ends, as they finish.

    All of them must fit into the pool. `version` is that of the weights.
    """
    scheduler.add(make_samples(requests, limits, sampling.seed))
    for sample, reason in backend.run(scheduler, sampling, take_aborts):
        if reason == "error":
            yield not_finite(sample.index, requests[sample.index], len(sample.tokens) - 1, version)
        else:
            ids, log_probs = torch.tensor(sample.tokens, dtype=torch.int64), torch.tensor(sample.log_probs, dtype=torch.float32)
            yield Completion(sample.index, ids, log_probs, reason, version)


def make_samples(requests: Requests, limits: dict[int, Stopping], seed: int) -> list[Sample]:
    """A sample for each of `limits`, those of one prompt together, in the order in which the prompts first appear."""
    keys = request_keys(seed, [requests[index].key for index in limits]).tolist()
    groups: dict[bytes, tuple[Prompt, list[Sample]]] = {}
    for (index, own), key in zip(limits.items(), keys, strict=True):
        ids = requests[index].prompt_ids
        prompt, samples = groups.setdefault(ids.numpy().tobytes(), (Prompt(ids.tolist()), []))
        samples.append(Sample(index, prompt, own, key))
    return [sample for _, samples in groups.values() for sample in samples]
