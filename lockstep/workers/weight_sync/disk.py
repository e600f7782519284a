"""disk: through a safetensors file in a folder that both sides see. For engines that read files only, and where nothing else works."""

import contextlib
import fcntl
import os
import shutil
import socket
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
    """Writes the weights to a new folder inside `parent`, which is removed by `close`.

    The folder is locked until then. What is not any more was left by a process of this machine that was killed: the next sender removes it.
    """

    def __init__(self, version: int, parent: str | None = None) -> None:
        self._version = version
        in_memory = "/dev/shm" if Path("/dev/shm").is_dir() else tempfile.gettempdir()
        self._parent = parent if parent is not None else in_memory
        self._folder: str | None = None
        self._lock: int | None = None

    def send(self, weights: Weights) -> Manifest:
        try:
            Path(self._parent).mkdir(parents=True, exist_ok=True)
            _remove_left_behind(self._parent)
            self._folder, self._lock = _make_folder(self._parent, self._version)
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
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _prefix() -> str:
    return f"lockstep-weights-{socket.gethostname()}-"


def _make_folder(parent: str, version: int) -> tuple[str, int | None]:
    """A new folder, and its lock."""
    while True:
        folder = tempfile.mkdtemp(prefix=f"{_prefix()}{version}-", dir=parent)
        try:
            return folder, _locked(folder)
        except (BlockingIOError, FileNotFoundError):
            continue  # another sender took it for one left behind in the moment before it was locked
        except OSError:
            return folder, None  # no locks on this file system, so nobody removes anything there


def _locked(folder: str) -> int:
    """A descriptor of the folder, which is locked while it is open. Raises OSError, BlockingIOError when another one has it locked."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.stat(folder)  # who had it locked may have removed it
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _remove_left_behind(parent: str) -> None:
    """Remove what nobody has locked, of this machine's (its locks say nothing of others) and this user's."""
    for name in os.listdir(parent):
        folder = os.path.join(parent, name)
        with contextlib.suppress(OSError):
            if name.startswith(_prefix()) and os.lstat(folder).st_uid == os.geteuid():
                lock = _locked(folder)
                shutil.rmtree(folder, ignore_errors=True)
                os.close(lock)
