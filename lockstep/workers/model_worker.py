"""What the two worker classes share: memory that is counted before models are loaded, peaks of stages, and the report of an update."""

from __future__ import annotations

import socket
import time

import torch

from lockstep.models.flops import peak_flops
from lockstep.observability.metrics import Mean, Metric
from lockstep.planner.count import Load
from lockstep.planner.memory import Model, Rollout
from lockstep.planner.needs import Needs
from lockstep.protocol import DataProto
from lockstep.single_controller.base import Dispatch, Worker, register
from lockstep.utils.memory import available_ram, free_device_memory
from lockstep.workers.engine.base import OptimResult, TrainEngine
from lockstep.workers.engine.stage import Stages


class ModelWorker(Worker):
    """A worker with models."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = Stages(self.device)

    def count(self, load: Load) -> tuple[list[Model], Rollout | None]:
        """The models that `init_model` loads, and the rollout."""
        raise NotImplementedError

    @register(Dispatch.ONE_TO_ALL)
    def memory_needs(self, load: Load) -> Needs | None:
        """What `init_model` and the stages will take on the device, and what is free; None on a CPU, whose memory is the host's already."""
        free = free_device_memory(self.device)
        return None if free is None else Needs(free, available_ram(), socket.gethostname(), *self.count(load))

    @register(Dispatch.ONE_TO_ALL)
    def take_peaks(self) -> dict[str, Metric]:
        """Peaks of GPU memory of this process that no update has reported (see Stages.take_peaks)."""
        return self.stages.take_peaks()


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
