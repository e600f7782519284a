"""What the two worker classes share: memory that is counted before models are loaded, peaks of stages, and checkpoints."""

import socket
from dataclasses import replace
from pathlib import Path

from lockstep.observability.metrics import Metric
from lockstep.planner import Load, Model, Needs, Rollout, candidates, reusing_models
from lockstep.single_controller.base import Dispatch, Worker, register
from lockstep.utils.garbage import freeze_objects
from lockstep.utils.memory import available_ram, free_device_memory
from lockstep.workers.engine.base import TrainEngine
from lockstep.workers.engine.memory_watch import MemoryWatch
from lockstep.workers.engine.share_writer import ShareWriter


class ModelWorker(Worker):
    """A worker with models."""

    skips_nonfinite = False

    def __init__(self) -> None:
        super().__init__()
        self.memory = MemoryWatch(self.device)
        self._share_writer = ShareWriter(self.device)

    @property
    def trained(self) -> TrainEngine:
        """The engine whose model is saved."""
        raise NotImplementedError

    def count(self, load: Load) -> tuple[list[Model], Rollout | None]:
        """The models that `init_model` loads, and the rollout."""
        raise NotImplementedError

    @register(Dispatch.ONE_TO_ALL)
    def memory_needs(self, load: Load) -> Needs | None:
        """What `init_model` and the stages will take on the device, and what is free; None on a CPU, whose memory is the host's already."""
        free = free_device_memory(self.device)
        if free is None:
            return None
        with reusing_models():
            options = {tokens: self.count(replace(load, auto_tokens=tokens)) for tokens in candidates(load)}
        return Needs(free, available_ram(), socket.gethostname(), *options[min(options)], options)

    @register(Dispatch.ONE_TO_ALL)
    def skip_nonfinite(self) -> None:
        """From now on an update whose loss or gradient is not finite is left out, and counted (engine/skip.py)."""
        self.skips_nonfinite = True

    @register(Dispatch.ONE_TO_ALL)
    def freeze_objects(self) -> None:
        """Leave all that is loaded out of this process's garbage collections, until it ends. Not for the driver's process."""
        freeze_objects()

    @register(Dispatch.ONE_TO_ALL)
    def take_peaks(self) -> dict[str, Metric]:
        """Peaks of GPU memory of this process that no update has reported (see MemoryWatch.take_peaks)."""
        return self.memory.take_peaks()

    @register(Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, local_path: str) -> None:
        """Write the model to a folder."""
        self.trained.save(Path(local_path))

    @register(Dispatch.ONE_TO_ALL)
    def begin_checkpoint(self, local_path: str, in_background: bool) -> str:
        """Write the model to a folder as it is now; with `in_background` this returns when it has been copied to host memory.

        Returns the file that will say when this rank's share is written, or why it was not (checkpoint/saver.py); that is not raised.
        """
        writer, path = self._share_writer, Path(local_path)
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
        """Wait until this rank's share is written; returns what went wrong."""
        return self._share_writer.wait()
