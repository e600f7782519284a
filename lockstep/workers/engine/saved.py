"""SavedEngine: how every training engine is saved and loaded. Backends give whole tensors, and take their parts of them."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch.distributed as dist
from torch import Tensor

from lockstep.models.weight_files import WeightFiles, write_weights
from lockstep.workers.engine.checkpoint import (
    MOMENTS,
    OPTIMIZER,
    WEIGHTS,
    ModelFolder,
    Place,
    Progress,
    Specs,
    Write,
    open_moments,
    read_progress,
    write_index,
    write_progress,
    write_shares,
)
from lockstep.workers.engine.optim import Updates
from lockstep.workers.engine.sharded import ReadRows


class SavedEngine(ABC):
    """One model on `world_size` ranks as a checkpoint has it. Every method is called on all ranks together."""

    folder: ModelFolder
    """The model as a checkpoint has it."""
    rank: int
    world_size: int
    _updates: Updates

    @abstractmethod
    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, whole tensor) of every parameter and saved buffer; a tied weight comes once.

        On one rank the tensors are the parameters themselves, not copies: they follow later updates (unless `exports_copies`).
        """

    @abstractmethod
    def _read_weights(self, path: Path, files: WeightFiles) -> None:
        """Take over the weights of a checkpoint, whose shapes have been checked. `path` is its folder."""

    @abstractmethod
    def _export_moments(self, kind: str) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, whole tensor) of one of AdamW's moments for every weight that learns; zeros where there was no update yet.
        Changes nothing: an optimizer that has no state keeps none."""

    @abstractmethod
    def _read_moments(self, kind: str, read: ReadRows) -> None:
        """Replace one of AdamW's moments."""

    @abstractmethod
    def _set_steps(self, progress: Progress) -> None:
        """Replace AdamW's count of updates; called after `_read_moments`."""

    def _steps(self) -> dict[str, int]:
        """Name -> AdamW's count of updates, of the weights that this rank has."""
        return dict.fromkeys(self.moment_specs, self._updates.done)

    def on_device(self) -> AbstractContextManager[None]:
        """Context in which the weights are on the device. Every method sees to it by itself; who calls several holds it around them,
        so that an offloaded engine is moved once."""
        return nullcontext()

    def _check(self, path: Path) -> None:  # noqa: B027  (most have nothing to add)
        """Raise DataError for a checkpoint that this engine cannot go on from, beyond the shapes of its weights."""

    @property
    def moment_specs(self) -> Specs:
        """Hugging Face name -> type and shape of each moment of what learns."""
        return self.folder.specs

    def _saved_weights(self) -> Iterator[tuple[str, Tensor]]:
        """The weights as a checkpoint has them."""
        return self.export_weights()

    def save(self, path: Path, write: Write = write_weights) -> None:
        """Write a Hugging Face folder (weights, config) and, for a trained model, what the optimizer needs to go on.

        Each rank writes a share with `write`; the folder is whole when all have written. The engine stays as it is, to the bit.
        """
        place, files = Place(self.rank, self.world_size), {path / WEIGHTS: self.folder.specs}
        folder = path / OPTIMIZER if self._is_trained else path
        folder.mkdir(parents=True, exist_ok=True)
        write_shares(path / WEIGHTS, self.folder.specs, self._saved_weights(), place, write)
        found: list[dict[str, int]] = [{}] * self.world_size
        if self._is_trained:
            for kind in MOMENTS:
                file = path / OPTIMIZER / f"{kind}.safetensors"
                files[file] = self.moment_specs
                write_shares(file, self.moment_specs, self._export_moments(kind), place, write)
            dist.all_gather_object(found, self._steps())
        try:  # what can fail on one rank alone comes after all that the ranks do together
            if self.rank == 0:
                self.folder.write_config(path)
                for file, specs in files.items():
                    write_index(file, specs, self.world_size)
                if self._is_trained:
                    steps = {name: max(part.get(name, 0) for part in found) for name in self.moment_specs}
                    write_progress(path, Progress(self._updates.done, steps))
        finally:
            dist.barrier()  # no rank goes on before the files are there

    @property
    def _is_trained(self) -> bool:
        return self._updates.config is not None

    def load(self, path: Path) -> None:
        """Read what `save` wrote, at any number of ranks. Raises DataError, before anything changes, where it does not fit."""
        weights = self.folder.open(path)
        self._check(path)
        moments = {kind: open_moments(path, kind, self.moment_specs) for kind in MOMENTS} if self._is_trained else {}
        progress = read_progress(path, self.moment_specs) if self._is_trained else None
        with self.on_device():
            self._read_weights(path, weights)
            for kind, files in moments.items():
                self._read_moments(kind, files.read)
            if progress is not None:
                self._set_steps(progress)
                self._updates.done = progress.updates
