"""SavedFSDP: how an FSDPEngine is saved and loaded."""

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from lockstep.errors import DataError
from lockstep.models.lora import ADAPTER, Lora
from lockstep.models.weight_files import WeightFiles, write_weights
from lockstep.workers.engine.base import TrainEngine
from lockstep.workers.engine.checkpoint import Progress, Specs, Write
from lockstep.workers.engine.fsdp import moments, sharding
from lockstep.workers.engine.fsdp.adapters import load_adapter, open_adapter, save_adapter
from lockstep.workers.engine.moments import set_steps, steps_of
from lockstep.workers.engine.offload import Offload, move_state
from lockstep.workers.engine.sharded import ReadRows


class SavedFSDP(TrainEngine):
    """What SavedEngine asks of a backend, for a model of FSDP or FSDP2 with AdamW and, where it has them, adapters."""

    _lora: Lora | None
    _optimizer: torch.optim.AdamW | None
    _moment_specs: Specs
    _offload: Offload | None
    """Moves the weights to the host and back; None where they stay on the device."""
    _offloads_state: bool
    """Whether AdamW's moments are in host memory between updates."""

    def save(self, path: Path, write: Write = write_weights) -> None:
        with self.on_device():
            super().save(path, write)
            if self._lora is not None:
                save_adapter(self.module, self._lora, path / ADAPTER, writes=self.rank == 0)

    @property
    def moment_specs(self) -> Specs:
        return self._moment_specs

    def _check(self, path: Path) -> None:
        if self._lora is not None:
            open_adapter(self._lora, path)
        elif self._optimizer is not None and (path / ADAPTER).is_dir():
            raise DataError(f"{path} was trained with adapters ({ADAPTER}); resume it with the model.lora_rank it had")

    def _read_weights(self, path: Path, files: WeightFiles) -> None:
        if self._offload is not None:
            self._offload.changed = True
        if self._lora is not None:
            load_adapter(self.module, self._lora, path, files)
        else:
            sharding.fill(self.module, files.read)

    def _export_moments(self, kind: str) -> Iterator[tuple[str, Tensor]]:
        assert self._optimizer is not None
        return moments.whole_moments(self.module, self._optimizer, kind, self._moment_specs, self.device)

    def _read_moments(self, kind: str, read: ReadRows) -> None:
        assert self._optimizer is not None
        moments.read_moments(self.module, self._optimizer, kind, read, self._moment_specs, self.device)

    def _steps(self) -> dict[str, int]:
        assert self._optimizer is not None
        return steps_of(self._optimizer, moments.learning_parameters(self.module))

    def _set_steps(self, progress: Progress) -> None:
        assert self._optimizer is not None
        parameters = moments.learning_parameters(self.module)
        set_steps(self._optimizer, {name: p for name, p in parameters.items() if p in self._optimizer.state}, progress.steps)
        if self._offloads_state:
            move_state(self._optimizer, torch.device("cpu"))
