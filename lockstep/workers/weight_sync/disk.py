"""disk: through a safetensors file in a folder that both sides see. For engines that read files only, and where nothing else works."""

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from lockstep.errors import WeightSyncError
from lockstep.workers.weight_sync.base import Manifest, Stream, WeightOffer, Weights, WeightSender, describe

WEIGHTS = "model.safetensors"


@dataclass(frozen=True)
class DiskOffer(WeightOffer):
    """A folder with one safetensors file."""

    version: int
    manifest: Manifest
    folder: str

    def open(self, device: torch.device, receiver: int) -> Stream:
        file = Path(self.folder) / WEIGHTS
        try:
            with safe_open(file, "pt") as tensors:
                known = set(tensors.keys())
                return [(name, info, tensors.get_tensor(name)) for name, info in self.manifest.items() if name in known]
        except (OSError, SafetensorError) as error:
            raise WeightSyncError(
                f"the weights of version {self.version} cannot be read from {file} ({error}): is the folder seen by both sides, and "
                "its disk not full? It is actor_rollout_ref.rollout.weight_sync_dir"
            ) from error


class DiskSender(WeightSender):
    """Writes the weights to a new folder inside `parent`, which is removed by `close`."""

    def __init__(self, version: int, parent: str | None = None) -> None:
        self._version = version
        in_memory = "/dev/shm" if Path("/dev/shm").is_dir() else tempfile.gettempdir()
        self._parent = parent if parent is not None else in_memory
        self._folder: str | None = None

    def send(self, weights: Weights) -> Manifest:
        try:
            Path(self._parent).mkdir(parents=True, exist_ok=True)
            self._folder = tempfile.mkdtemp(prefix=f"lockstep-weights-{self._version}-", dir=self._parent)
            tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in weights}
            manifest = {name: describe(tensor) for name, tensor in tensors.items()}
            save_file(tensors, Path(self._folder) / WEIGHTS, metadata={"format": "pt"})
        except (OSError, SafetensorError) as error:
            raise WeightSyncError(
                f"the weights of version {self._version} cannot be written to {self._parent} ({error}); set "
                "actor_rollout_ref.rollout.weight_sync_dir to a folder with room"
            ) from error
        self._offer = DiskOffer(self._version, manifest, self._folder)
        return manifest

    def close(self) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None
