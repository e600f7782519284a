"""What a checkpoint remembers of the training data, so that a run that goes on can tell that it has become other data."""

import contextlib
import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lockstep.data.row_files import data_files
from lockstep.errors import DataError

_END_BYTES = 4 << 20
"""How much is read at each end of a file: smaller files are read whole, and the end of a parquet file says where everything in it is."""


def seen_data(config: Any, num_rows: int) -> dict[str, Any]:
    """The number of rows that are trained on, and a digest of the files, wherever they lie: of their sizes, beginnings and ends.

    `config` is the `data` section; what is no file in its train_files, which only a dataset class of the user's own reads, has no part.
    """
    files = config.train_files
    digest = hashlib.sha256()
    names = files if isinstance(files, Sequence) and not isinstance(files, str) else [files]
    paths: list[Path] = []
    with contextlib.suppress(DataError):  # a folder without rows, which a class of the user's own reads
        paths = data_files([str(name) for name in names])
    for path in paths:
        if path.is_file():
            size = path.stat().st_size
            digest.update(f"{size}:".encode())
            with path.open("rb") as file:
                digest.update(file.read(_END_BYTES))
                file.seek(max(_END_BYTES, size - _END_BYTES))
                digest.update(file.read())
    return {"num_train_rows": num_rows, "train_files_digest": digest.hexdigest()}


def tell_of_other_data(then: Mapping[str, Any], now: Mapping[str, Any], say: Callable[[str], None]) -> None:
    """Warn where these two are not of the same data. A version that kept no digest has nothing to compare."""
    rows = (then["num_train_rows"], now["num_train_rows"])
    if then.get("train_files_digest", now["train_files_digest"]) == now["train_files_digest"] and rows[0] == rows[1]:
        return
    how = (
        f"now there are {rows[1]}; their order is a new one"
        if rows[0] != rows[1]
        else "the contents of data.train_files are others now"
    )
    say(f"warning: the checkpoint saw {rows[0]} training rows, {how}")
