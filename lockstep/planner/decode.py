"""How long one rank generates: decoding step by step, with as many sequences at once as there are seats and memory.

A step of B rows reads all weights and the keys and values of B sequences. The constants were measured on an H200 with the native engine
(docs/plan.md); `ENGINES` says how much longer others took there.
"""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

from lockstep.planner.hardware import Device
from lockstep.planner.time import Shape

BUCKETS = (8, 16, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512, 640, 768, 896, 1024)
"""Batch sizes that are captured: a step of fewer rows takes the time of the next."""
WEIGHT_READING, PRODUCTS, BEND = 0.88, 0.73, 1.5
"""Of the bandwidth and of the peak; a product that is near both limits takes (a^BEND + b^BEND)^(1/BEND)."""
FEW_ROWS = 128
"""Up to so many rows a step has kernels of its own (gpu/few_rows.py, gpu/new_token.py)."""
CACHE_READING, FEW_CACHE_READING = 0.62, 0.88
"""Of the bandwidth, what attention reaches."""
LAYER_S, FEW_LAYER_S = 30e-6, 19e-6
"""The least time of a layer: its kernels follow one another."""
ROW_BYTES, FEW_ROW_BYTES, SAMPLE_BYTES = 96, 160, 5
"""Moved per row for each number of a layer's stream, and for each entry of the vocabulary in drawing a token."""
PREFILL = 0.42
"""Of the peak, what the pass over prompts reaches."""
INTERVAL, ADMIT_S, HOST_S = 8, 0.25e-3, 2e-6
"""Steps between looks at what has ended; per layer, the least time of a pass that admits others; per row and step, the host's work."""
SHARED_FROM = 256
"""Seats from which attention reads the prompt of several responses once."""
ENGINES = {"native": 1.0, "vllm": 2.4, "sglang": 2.4, "hf": 15.0}
"""Engine -> how much longer it takes; vllm as on one load, sglang as vllm, hf roughly."""
SPREAD = 0.55
"""The standard deviation of the logarithm of response lengths where only their mean is known."""


@dataclass(frozen=True)
class Generation:
    """What one rank generates."""

    prompts: Sequence[float]
    """Tokens of the prompt of each response; neighbours share one where `n` says so."""
    responses: Sequence[float]
    """Tokens of each response."""
    n: int
    """Responses per prompt, which stand together."""
    seats: int
    """Sequences at once."""


def generate_s(shape: Shape, work: Generation, device: Device, element: int = 2, kept: str = "auto") -> float:
    """Seconds of the native engine, prompts included, for weights and cache in numbers of `element` bytes, or the cache in fewer (`kept`:
    rollout.kv_cache_dtype)."""
    token_bytes = shape.token_bytes(element, kept)
    own_prompts = sum(work.prompts[:: work.n])
    seconds = 2 * shape.cost.body * own_prompts / (PREFILL * device.flops)
    sharing = work.n if work.seats >= SHARED_FROM else 1
    waiting = list(range(len(work.responses) - 1, -1, -1))
    alive: list[tuple[float, float]] = []
    """The step at which a sequence ends, and the tokens that it then has in the cache."""
    step = context = admitted = 0.0
    while waiting or alive:
        if waiting and step:  # some ended: others take their seats, once per interval
            seconds += min(1.0, (step - admitted) / INTERVAL) * shape.layers * ADMIT_S
            admitted = step
        while waiting and len(alive) < work.seats:
            i = waiting.pop()
            prompt = work.prompts[i] / sharing
            heapq.heappush(alive, (step + work.responses[i], prompt + work.responses[i]))
            context += prompt
        rows, end = len(alive), alive[0][0]
        cached = token_bytes * (context + rows * (end - step) / 2)
        seconds += (end - step) * step_s(shape, rows, cached, device, element)
        context += rows * (end - step)
        step = end
        while alive and alive[0][0] <= step:
            context -= heapq.heappop(alive)[1]
    return seconds


def step_s(shape: Shape, rows: int, cached: float, device: Device, element: int) -> float:
    """One decoding step of `rows` rows with `cached` bytes of keys and values."""
    batch = next((size for size in BUCKETS if size >= rows), rows)
    weights = element * (shape.cost.body + shape.cost.head) / (WEIGHT_READING * device.bandwidth)
    products = 2 * (shape.cost.body + shape.cost.head) * batch / (PRODUCTS * device.flops)
    few = (FEW_CACHE_READING, FEW_LAYER_S, FEW_ROW_BYTES)
    share, layer_s, row_bytes = few if batch <= FEW_ROWS else (CACHE_READING, LAYER_S, ROW_BYTES)
    reading = cached / (share * device.bandwidth)
    moved = batch * (row_bytes * shape.layers * shape.hidden + SAMPLE_BYTES * shape.vocabulary) / device.bandwidth
    on_device = (weights**BEND + products**BEND) ** (1 / BEND) + reading + moved + shape.layers * layer_s
    return max(on_device, rows * HOST_S)


def spread_lengths(mean: float, longest: int, count: int) -> list[float]:
    """`count` response lengths with this mean and none above `longest`: all alike where that is the mean, else lognormal and cut."""
    if mean >= longest or count == 1:
        return [min(mean, longest)] * count
    normal = NormalDist()
    quantiles = [math.exp(SPREAD * normal.inv_cdf((i + 0.5) / count)) for i in range(count)]
    low, high = 0.0, float(longest) * 4
    for _ in range(50):  # the scale with which the cut lengths have the mean
        scale = (low + high) / 2
        low, high = (scale, high) if sum(min(longest, scale * q) for q in quantiles) / count < mean else (low, scale)
    lengths = [min(float(longest), scale * q) for q in quantiles]
    order = sorted(range(count), key=lambda i: (i * 2654435761) % 2**32)  # long and short ones in no order
    return [lengths[i] for i in order]
