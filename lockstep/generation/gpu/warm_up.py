"""A generation on a GPU before the first: what it will compute is compiled."""

import torch

from lockstep.config.sampling import SamplingParams
from lockstep.generation.engine import NativeRollout
from lockstep.generation.gpu.backend import GPUBackend
from lockstep.workers.rollout.request import Request

_PROMPT = 16


def warm_generation(engine: NativeRollout, sampling: SamplingParams, n: int) -> None:
    """Prompts, drawing, and decode steps of every size up to `max_num_seqs` rows, for `n` samples per prompt with these parameters.

    The engine has its weights. It sleeps afterwards.
    """
    prompt = torch.ones(min(_PROMPT, (engine.context or _PROMPT + 2) - 2), dtype=torch.int64)
    for _ in engine.generate_stream([Request(prompt, (0, 0, sample)) for sample in range(2)], sampling):
        pass
    assert isinstance(engine.backend, GPUBackend)
    engine.backend.warm_up(engine.seats, sampling, shares=n > 1)
    engine.sleep()
