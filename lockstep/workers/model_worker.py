"""ModelWorker: what all workers with models share. It counts memory before models are loaded, measures stages, makes updates and saves."""

import math
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from lockstep.errors import NumericalError, OutOfMemory
from lockstep.models.flops import peak_flops
from lockstep.models.packing import Budget
from lockstep.observability.metrics import Max, Mean, Metric
from lockstep.planner import Load, Model, Needs, Rollout, candidates, reusing_models
from lockstep.protocol import DataProto
from lockstep.single_controller.base import Dispatch, Worker, register
from lockstep.utils.device import available_ram, free_device_memory
from lockstep.utils.garbage import freeze_objects
from lockstep.workers.engine.base import LossFn, OptimResult, TrainEngine
from lockstep.workers.engine.dtensor import local_part
from lockstep.workers.engine.share_writer import ShareWriter

_GIB = 2**30

_peaks: dict[torch.device, dict[str, Metric]] = {}
"""Peaks of this process that no worker has reported yet. Its workers share them: some (a reference, a reward model) return no metrics."""


class MemoryWatch:
    """Measures the stages of a step on `device`, and keeps the peaks of GPU memory until a worker of this process takes them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @contextmanager
    def stage(self, name: str, token_counts: Sequence[int], budget: Budget | None, key: str) -> Iterator[None]:
        """Context of a stage over rows of these token counts, cut by `budget`; `key` is the config key to lower first.

        Raise OutOfMemory, with the stage, the sizes and the key, instead of an out-of-memory error.
        """
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        try:
            yield
        except RuntimeError as error:
            if not _is_out_of_memory(error):
                raise
            raise OutOfMemory(_advice(name, token_counts, budget, key, str(error))) from error
        if self._device.type == "cuda":
            peaks = _peaks.setdefault(self._device, {})
            for kind, peak in (("allocated", torch.cuda.max_memory_allocated), ("reserved", torch.cuda.max_memory_reserved)):
                metric = f"perf/max_memory_{kind}_gb/{name}"
                own = Max(peak(self._device) / _GIB)
                peaks[metric] = own.merge(peaks.get(metric, own))

    def take_peaks(self) -> dict[str, Metric]:
        """Return perf/max_memory_{allocated,reserved}_gb/NAME of every stage of this process since the last call; nothing on a CPU."""
        return _peaks.pop(self._device, {})


def _is_out_of_memory(error: RuntimeError) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def _advice(name: str, token_counts: Sequence[int], budget: Budget | None, key: str, error: str) -> str:
    sizes = f"{len(token_counts)} rows of {sum(token_counts)} tokens, the longest {max(token_counts, default=0)}"
    cut = ""
    if budget is not None:
        cut = f", up to {budget.max_tokens} tokens at once" if budget.max_rows is None else f", {budget.max_rows} rows at once"
    first = error.strip().splitlines()[0]
    return f"out of memory in stage {name} ({sizes}{cut}): {first}. Lower {key} first; it never changes a result"


class ModelWorker(Worker):
    """A worker with models."""

    skips_nonfinite = False
    """Whether an update whose loss or gradient is not finite is skipped."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = MemoryWatch(self.device)
        self._share_writer = ShareWriter(self.device)

    @property
    def trained(self) -> TrainEngine:
        """The engine whose model is saved."""
        raise NotImplementedError

    def count(self, load: Load) -> tuple[list[Model], Rollout | None]:
        """Return the models that `init_model` loads, and the rollout."""
        raise NotImplementedError

    @register(Dispatch.ONE_TO_ALL)
    def memory_needs(self, load: Load) -> Needs | None:
        """Return the memory that `init_model` and the stages need on the device, and the free memory; None on a CPU."""
        free = free_device_memory(self.device)
        if free is None:
            return None
        with reusing_models():
            options = {tokens: self.count(replace(load, auto_tokens=tokens)) for tokens in candidates(load)}
        return Needs(free, available_ram(), socket.gethostname(), *options[min(options)], options)

    @register(Dispatch.ONE_TO_ALL)
    def skip_nonfinite(self) -> None:
        """From now on skip updates whose loss or gradient is not finite, and count them."""
        self.skips_nonfinite = True

    @register(Dispatch.ONE_TO_ALL)
    def freeze_objects(self) -> None:
        """Leave everything loaded so far out of this process's garbage collections. Not for the driver's process."""
        freeze_objects()

    @register(Dispatch.ONE_TO_ALL)
    def take_peaks(self) -> dict[str, Metric]:
        """Return the peaks of GPU memory of this process that no update has reported (see MemoryWatch.take_peaks)."""
        return self.memory.take_peaks()

    @register(Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, local_path: str) -> None:
        """Write the model to a folder."""
        self.trained.save(Path(local_path))

    @register(Dispatch.ONE_TO_ALL)
    def begin_checkpoint(self, local_path: str, in_background: bool) -> str:
        """Write the present model to a folder; with `in_background` return as soon as it is copied to host memory.

        Return the path of the report of this rank's share (checkpoint/saver.py). A failed write is reported there, not raised.
        """
        writer = self._share_writer
        path = Path(local_path)
        writer.begin(in_background)
        failure = None
        try:
            self.trained.save(path, writer)
        except OSError as error:
            failure = error
        report = path / f"rank_{self.rank}.written"
        writer.finish(report, failure)
        return str(report)

    @register(Dispatch.ONE_TO_ALL)
    def finish_checkpoint(self) -> str | None:
        """Wait until this rank's share is written. Return the error, or None."""
        return self._share_writer.wait()


def update_or_skip(
    engine: TrainEngine,
    name: str,
    mini_batch: DataProto,
    loss: LossFn,
    budget: Budget,
    temperature: float,
    entropy_grad: bool,
) -> tuple[dict[str, Metric], OptimResult | None]:
    """Make an update; without a result if a loss on any rank, or the gradient, is not finite.

    Then no rank has changed a weight, and the gradients are cleared. NAME/skipped_updates is 1 for a skipped update, 0 otherwise.
    """
    metrics: dict[str, Metric] = {}
    try:
        metrics = engine.forward_backward(mini_batch, loss, budget, temperature, entropy_grad)
    except NumericalError:
        _spoil_gradient(engine)
    try:
        result = engine.optim_step()
    except NumericalError:
        return {f"{name}/skipped_updates": Mean(1.0)}, None
    return metrics | {f"{name}/skipped_updates": Mean(0.0)}, result


def _spoil_gradient(engine: TrainEngine) -> None:
    """Make this rank's gradient NaN.

    The gradient's norm, which all ranks compute together, then tells the other ranks to skip the update too. A flag would need a collective
    of its own, and a wait for it, in every update.
    """
    for parameter in engine.module.parameters():
        gradient = getattr(parameter, "main_grad", parameter.grad)  # the first is megatron-core's
        if gradient is not None and local_part(gradient).numel():
            local_part(gradient).fill_(math.nan)
            return


def update_metrics(
    prefix: str, engine: TrainEngine, mini_batch: DataProto, result: OptimResult | None, started: float
) -> dict[str, Metric]:
    """Return the gradient norm, the learning rate and tokens per second of one device since `started` (time.perf_counter).

    On a GPU whose peak is known, also the share of the peak that was used (MFU). Without a `result`, nothing. Waits for the GPU.
    """
    if result is None:
        return {}
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
        metrics[f"perf/model_mfu/{prefix}"] = Mean(flops, seconds * peak)
    return metrics
