"""Random access to the rows of parquet and JSON files under one numbering.

Parquet can only be decoded a row group at a time, and shuffled reading touches all of them in every step. So a file is
decoded once, when a row of it is first asked for, into a temporary file that is mapped into memory: the operating system
keeps of it what there is room for. A row becomes Python objects only when it is returned. One column can also be read
through in batches of Arrow values, which holds a small part of it at a time. JSON has no such structure and is read
whole: keep large data in parquet.
"""

import functools
import glob
import tempfile
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeAlias

import pyarrow as pa
import pyarrow.parquet as pq

from lockstep.data.json_file import JsonFile
from lockstep.errors import DataError

_ENDINGS = (".parquet", ".json", ".jsonl")
_BATCH_ROWS = 16_384
"""Rows that are decoded at a time."""
_READ_BYTES = 2**20
"""Bytes of a file that are read at a time; without it a column's whole part of a row group would be."""

Values: TypeAlias = pa.Array | list[Any]
"""Neighbouring values of one column: as Arrow has them from parquet, as Python objects from JSON."""


def data_files(paths: str | Path | Sequence[str | Path]) -> list[Path]:
    """Return the files that the paths stand for: folders and patterns as their files in the order of their names.

    Raises DataError for a folder or a pattern that has none. A file need not be there.
    """
    found: list[Path] = []
    for path in [paths] if isinstance(paths, str | Path) else paths:
        named = Path(path).expanduser()
        if named.is_dir():
            files = sorted(file for file in named.iterdir() if _has_rows(file))
            if not files:
                raise DataError(f"the folder {path} has no file that ends in {', '.join(_ENDINGS)}")
            found += files
        elif not named.exists() and glob.has_magic(str(named)):
            files = sorted(file for name in glob.glob(str(named), recursive=True) if _has_rows(file := Path(name)))
            if not files:
                raise DataError(f"no file that ends in {', '.join(_ENDINGS)} fits the pattern {path}")
            found += files
        else:
            found.append(named)
    return found


def _has_rows(path: Path) -> bool:
    return path.suffix in _ENDINGS and not path.name.startswith(".") and path.is_file()


class RowFiles:
    """The rows of `paths`, one file after the other, numbered from 0.

    A path is a file, a folder, which stands for its files of rows in the order of their names, or a pattern such as data/*.parquet.
    `columns` is the union of the files' columns; a row of a file that lacks one has None there. Raises DataError for
    a file that is missing, has another extension than .parquet, .json or .jsonl, or cannot be read, and for a folder or a pattern without
    such files.
    """

    def __init__(self, paths: Sequence[str | Path]) -> None:
        self._files = [_open(path) for path in data_files(paths)]
        self._starts = [0, *accumulate(file.num_rows for file in self._files)]
        self.columns = list(dict.fromkeys(name for file in self._files for name in file.columns))

    def __len__(self) -> int:
        return self._starts[-1]

    def rows(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """The rows at `indices`, in that order, as plain Python objects with every name of `columns`."""
        found = []
        for index in indices:
            part = bisect_right(self._starts, index) - 1
            row = self._files[part].row(index - self._starts[part])
            found.append({name: row.get(name) for name in self.columns})
        return found

    def path(self, index: int) -> Path:
        """The file of a row."""
        return self._files[bisect_right(self._starts, index) - 1].path

    def place(self, index: int) -> str:
        """The file of a row and its number there, for errors."""
        return f"{self.path(index)} row {index - self._starts[bisect_right(self._starts, index) - 1]}"

    def batches(self, column: str, missing_ok: bool = False) -> Iterator[tuple[int, Values]]:
        """All values of one column, in order, as (row number of the first, values); other columns are not read.

        A file without that column is left out with `missing_ok`, else raises DataError.
        """
        for start, file in zip(self._starts, self._files, strict=False):
            if missing_ok and column not in file.columns:
                continue
            if file.num_rows and column not in file.columns:
                raise DataError(f"{file.path} has no column {column!r}; it has {sorted(file.columns)}")
            for values in file.batches(column):
                yield start, values
                start += len(values)


class _ParquetFile:
    def __init__(self, path: Path) -> None:
        self.path = path
        with _errors_name(path):
            # Not memory-mapped: the pages of the file would count as this process's memory.
            self._file = pq.ParquetFile(path, buffer_size=_READ_BYTES, pre_buffer=False)
        self.num_rows: int = self._file.metadata.num_rows
        self.columns: Sequence[str] = self._file.schema_arrow.names

    def row(self, index: int) -> dict[str, Any]:
        with _errors_name(self.path):
            batches, starts = self._decoded
            part = bisect_right(starts, index) - 1
            row: dict[str, Any] = batches[part].slice(index - starts[part], 1).to_pylist()[0]
            return row

    @functools.cached_property
    def _decoded(self) -> tuple[list[pa.RecordBatch], list[int]]:
        """The whole file in batches of rows, mapped into memory, and the number of each one's first row."""
        try:
            # Deleted at the end of the block; the mapping keeps its contents until the process ends, however it ends.
            with tempfile.NamedTemporaryFile(prefix="lockstep-rows-", suffix=".arrow") as file:
                with pa.ipc.new_stream(file, self._file.schema_arrow) as writer:
                    for batch in self._file.iter_batches(_BATCH_ROWS):
                        writer.write_batch(batch)
                file.flush()
                batches = list(pa.ipc.open_stream(pa.memory_map(file.name)))
        except OSError as error:
            raise DataError(
                f"cannot decode {self.path} into a temporary file: {error}; the environment variable TMPDIR names a folder with room"
            ) from error
        return batches, list(accumulate(map(len, batches), initial=0))

    def batches(self, column: str) -> Iterator[Values]:
        with _errors_name(self.path):
            for batch in self._file.iter_batches(_BATCH_ROWS, columns=[column]):
                yield batch.column(column)


def _open(path: Path) -> _ParquetFile | JsonFile:
    if path.suffix not in _ENDINGS:
        raise DataError(f"{path}: unknown extension {path.suffix!r}; data files are .parquet, .json or .jsonl")
    if not path.is_file():
        raise DataError(f"data file {path} does not exist")
    return _ParquetFile(path) if path.suffix == ".parquet" else JsonFile(path)


@contextmanager
def _errors_name(path: Path) -> Iterator[None]:
    try:
        yield
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read {path} as parquet: {error}") from error
