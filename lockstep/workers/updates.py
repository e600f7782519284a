"""What one update reports beside the metrics of its loss."""

from __future__ import annotations

import time

import torch

from lockstep.models.flops import peak_flops
from lockstep.observability.metrics import Mean, Metric
from lockstep.protocol import DataProto
from lockstep.workers.engine.base import OptimResult, TrainEngine


def update_metrics(
    prefix: str, engine: TrainEngine, mini_batch: DataProto, result: OptimResult, started: float
) -> dict[str, Metric]:
    """Norm of the gradient, learning rate, tokens per second of one device since `started` (time.perf_counter), and on a GPU whose peak is
    known the share of it that was used (MFU). Waits for the GPU."""
    on_gpu = engine.device.type == "cuda"
    if on_gpu:
        torch.cuda.synchronize(engine.device)
    seconds = time.perf_counter() - started
    counts = mini_batch.token_counts()
    metrics: dict[str, Metric] = {
        f"{prefix}/grad_norm": Mean(result.grad_norm),
        f"{prefix}/lr": Mean(result.lr),
        f"perf/tokens_per_s/{prefix}": Mean(float(counts.sum()), seconds),
    }
    peak = peak_flops(torch.cuda.get_device_name(engine.device)) if on_gpu and engine.dtype == torch.bfloat16 else None
    if peak is not None:
        flops = engine.cost.training(counts.tolist(), len(mini_batch.ragged("responses").values))
        metrics[f"perf/mfu/{prefix}"] = Mean(flops, seconds * peak)
    return metrics
