"""The reference's log-probs in a file: computed once, before the first update, and used again by later runs.

The file's name has a fingerprint of everything that decides the numbers: the bytes of the model's folder and of the data files, the
settings of the tokenisation, the type of the computation. It holds a log-prob and a number of trained tokens per row.
"""

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.data.pairs import PairDataset
from lockstep.data.row_files import data_files
from lockstep.errors import DataError
from lockstep.models.source import model_folder
from lockstep.observability.spans import progress
from lockstep.protocol import DataProto

_BLOCK = 1 << 20


class Referenced:
    """Rows with ref_response_log_prob beside them. `log_probs` and `lengths` are [positions, rows per position]."""

    def __init__(self, rows: PairDataset, log_probs: np.ndarray, lengths: np.ndarray, path: Path) -> None:
        self.log_probs = log_probs
        self.lengths = lengths
        self.rows = rows
        self._path = path

    def __len__(self) -> int:
        return len(self.rows)

    def batch(self, positions: Sequence[int]) -> DataProto:
        """Return the rows at these positions. Raise DataError if the file was made of other rows."""
        batch, chosen = self.rows.batch(positions), list(positions)
        if num_trained(batch).tolist() != self.lengths[chosen].flatten().tolist():
            raise DataError(f"{self._path} was made of other rows than those of the data files; delete it")
        batch.set("ref_response_log_prob", torch.from_numpy(self.log_probs[chosen].flatten()))
        return batch


def num_trained(batch: DataProto) -> np.ndarray:
    """Return the number of trained tokens of each row."""
    return np.array([int(row.sum()) for row in batch.ragged("response_mask").rows()])


def reference_path(files: Any, folder: str | None, fingerprint: str) -> Path:
    """Return the path of the log-probs of these data files: beside the first of them, or in `folder`."""
    first = data_files(files)[0]
    return (Path(folder).expanduser() if folder else first.parent) / f"{first.name}.reference-{fingerprint}.npz"


def fingerprint(model: str, files: Any, settings: Mapping[str, Any]) -> str:
    """Return 16 hex digits of the contents of the model's folder (a hub id: of its name) and of the files, and of the settings."""
    total = hashlib.blake2b(json.dumps(dict(settings), sort_keys=True, default=str).encode(), digest_size=8)
    source = Path(model_folder(model)).expanduser()
    total.update(str(model).encode() if not source.is_dir() else b"")
    of_model = sorted(path for path in source.iterdir() if path.is_file()) if source.is_dir() else []
    for path in (*of_model, *data_files(files)):
        total.update(path.name.encode())
        with path.open("rb") as stream:
            while block := stream.read(_BLOCK):
                total.update(block)
    return total.hexdigest()


def with_reference(rows: PairDataset, path: Path, log_prob: Callable[[DataProto], Tensor], batch_size: int) -> Referenced:
    """Return the rows with the log-probs in the file `path`. If it does not exist, compute them with `log_prob` and write it.

    Raise DataError if the file cannot be read or written.
    """
    if path.is_file():
        try:
            with np.load(path) as kept:
                return Referenced(rows, kept["log_probs"], kept["lengths"], path)
        except (OSError, ValueError, KeyError) as error:
            raise DataError(f"{path} cannot be read ({error}); delete it, and it is made again") from error
    log_probs, lengths = [], []
    with progress("computing the reference's log-probs", len(rows), "rows") as seen:
        for start in range(0, len(rows), batch_size):
            batch = rows.batch(range(start, min(start + batch_size, len(rows))))
            log_probs.append(log_prob(batch).numpy())
            lengths.append(num_trained(batch))
            seen.done = min(start + batch_size, len(rows))
    tables = [np.concatenate(part).reshape(len(rows), -1) for part in (log_probs, lengths)]
    found = Referenced(rows, tables[0], tables[1], path)
    _publish(path, found)
    return found


def _publish(path: Path, found: Referenced) -> None:
    """Write the file under another name first, so that a file of that name is complete."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}-", delete=False) as file:
            np.savez(file, log_probs=found.log_probs, lengths=found.lengths)
            file.flush()
            os.fsync(file.fileno())
        os.replace(file.name, path)
    except OSError as error:
        raise DataError(f"cannot write {path}: {error}; reference.folder names another place") from error
