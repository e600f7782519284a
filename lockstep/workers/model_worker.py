"""What the two worker classes share: memory that is counted before models are loaded, and peaks of stages."""

from __future__ import annotations

import socket

from lockstep.observability.metrics import Metric
from lockstep.planner.count import Load
from lockstep.planner.memory import Model, Rollout
from lockstep.planner.needs import Needs
from lockstep.single_controller.base import Dispatch, Worker, register
from lockstep.utils.memory import available_ram, free_device_memory
from lockstep.workers.engine.memory_watch import MemoryWatch


class ModelWorker(Worker):
    """A worker with models."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = MemoryWatch(self.device)

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
        """Peaks of GPU memory of this process that no update has reported (see MemoryWatch.take_peaks)."""
        return self.memory.take_peaks()
