"""Random access to the rows of parquet and JSON files under one numbering.

Parquet is read by row group when a row of it is asked for; recently used row groups are kept as Arrow tables, up to a
number of bytes, and a row becomes Python objects only when it is returned. JSON has no such structure and is read
whole: keep large data in parquet.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from lockstep.errors import DataError

_CACHE_BYTES = 512 * 2**20
_SCAN_ROWS = 1024
"""Rows of one column that are Python objects at a time while it is scanned."""


class RowFiles:
    """The rows of `paths`, one file after the other, numbered from 0.

    `columns` is the union of the files' columns; a row of a file that lacks one has None there. Raises DataError for
    a file that is missing, has another extension than .parquet, .json or .jsonl, or cannot be read.
    """

    def __init__(self, paths: Sequence[str | Path], cache_bytes: int = _CACHE_BYTES) -> None:
        cache = _TableCache(cache_bytes)
        self._files = [_open(Path(path).expanduser(), cache) for path in paths]
        self._starts = [0, *accumulate(file.num_rows for file in self._files)]
        self.columns = list(dict.fromkeys(name for file in self._files for name in file.columns))

    def __len__(self) -> int:
        return self._starts[-1]

    def row(self, index: int) -> dict[str, Any]:
        """Row `index` as plain Python objects, with every name of `columns`."""
        part = bisect_right(self._starts, index) - 1
        row = self._files[part].row(index - self._starts[part])
        return {name: row.get(name) for name in self.columns}

    def scan(self, column: str) -> Iterator[Any]:
        """The values of one column, in order; other columns are not read. Raises DataError for a file without that
        column.
        """
        for file in self._files:
            if file.num_rows and column not in file.columns:
                raise DataError(f"{file.path} has no column {column!r}; it has {sorted(file.columns)}")
            yield from file.scan(column)


class _File(Protocol):
    path: Path
    num_rows: int
    columns: Sequence[str]

    def row(self, index: int) -> dict[str, Any]: ...

    def scan(self, column: str) -> Iterator[Any]: ...


class _ParquetFile:
    def __init__(self, path: Path, cache: _TableCache) -> None:
        self.path, self._cache = path, cache
        with _errors_name(path):
            self._file = pq.ParquetFile(path, memory_map=True)
        metadata = self._file.metadata
        self.num_rows: int = metadata.num_rows
        self.columns: Sequence[str] = self._file.schema_arrow.names
        self._starts = [0, *accumulate(metadata.row_group(g).num_rows for g in range(metadata.num_row_groups))]

    def row(self, index: int) -> dict[str, Any]:
        group = bisect_right(self._starts, index) - 1
        with _errors_name(self.path):
            table = self._cache.get((self.path, group), lambda: self._file.read_row_group(group))
        return table.slice(index - self._starts[group], 1).to_pylist()[0]

    def scan(self, column: str) -> Iterator[Any]:
        with _errors_name(self.path):
            for batch in self._file.iter_batches(_SCAN_ROWS, columns=[column]):
                yield from batch.column(column).to_pylist()


class _JsonFile:
    """One JSON list of objects, or one object a line."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._rows = _parse_json(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise DataError(f"cannot read {path} as JSON (a list of objects, or one object a line): {error}") from error
        self.num_rows = len(self._rows)
        self.columns: Sequence[str] = list(dict.fromkeys(name for row in self._rows for name in row))

    def row(self, index: int) -> dict[str, Any]:
        return self._rows[index]

    def scan(self, column: str) -> Iterator[Any]:
        return (row.get(column) for row in self._rows)


class _TableCache:
    """Least recently used tables leave when the kept ones exceed `max_bytes`; the newest always stays."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes, self._tables = max_bytes, OrderedDict[tuple[Path, int], pa.Table]()

    def get(self, key: tuple[Path, int], read: Callable[[], pa.Table]) -> pa.Table:
        if key in self._tables:
            self._tables.move_to_end(key)
            return self._tables[key]
        self._tables[key] = read()
        while len(self._tables) > 1 and sum(table.nbytes for table in self._tables.values()) > self._max_bytes:
            self._tables.popitem(last=False)
        return self._tables[key]


def _open(path: Path, cache: _TableCache) -> _File:
    if path.suffix not in (".parquet", ".json", ".jsonl"):
        raise DataError(f"{path}: unknown extension {path.suffix!r}; data files are .parquet, .json or .jsonl")
    if not path.is_file():
        raise DataError(f"data file {path} does not exist (data.train_files, data.val_files)")
    return _ParquetFile(path, cache) if path.suffix == ".parquet" else _JsonFile(path)


def _parse_json(text: str) -> list[dict[str, Any]]:
    if text.lstrip().startswith("["):
        rows = json.loads(text)
    else:
        rows = []
        # Only "\n" separates lines: str.splitlines would also cut at characters that JSON allows inside strings.
        for number, line in enumerate(text.split("\n"), start=1):
            try:
                if line.strip():
                    rows.append(json.loads(line))
            except ValueError as error:
                raise ValueError(f"line {number}: {error}") from error
    for index, row in enumerate(rows):
        if not isinstance(row, dict):
            raise ValueError(f"row {index} is a {type(row).__name__}, not an object")
    return rows


@contextmanager
def _errors_name(path: Path) -> Iterator[None]:
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"cannot read {path} as parquet: {error}") from error
