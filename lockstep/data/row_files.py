"""Rows of parquet and JSON files under one numbering: read one at a time, a column at a time, chosen, measured and fingerprinted.

Parquet can only be decoded a row group at a time, and shuffled reading touches all of them in every step. So a file is
decoded once, when a row of it is first asked for, into a temporary file that is mapped into memory: the operating system
keeps of it what there is room for. A row becomes Python objects only when it is returned. One column can also be read
through in batches of Arrow values, which holds a small part of it at a time. JSON has no such structure and is read
whole: keep large data in parquet.
"""

import contextlib
import functools
import glob
import hashlib
import json
import re
import tempfile
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from lockstep.errors import ConfigError, DataError

_ENDINGS = (".parquet", ".json", ".jsonl")
_BATCH_ROWS = 16_384
"""Rows that are decoded at a time."""
_READ_BYTES = 2**20
"""Bytes of a file that are read at a time; without it a column's whole part of a row group would be."""

Values: TypeAlias = pa.Array | list[Any]
"""Neighbouring values of one column: as Arrow has them from parquet, as Python objects from JSON."""

_MAX_DEPTH = 200
"""Levels of lists and objects in a row: templates and whatever else follows them ends at about 1,000."""
_NEXT = re.compile(r"[\s,]*")
_BRACKET = re.compile(r"[\[\]{}]")
_END_BYTES = 4 << 20
"""How much is read at each end of a file: smaller files are read whole, and the end of a parquet file says where everything in it is."""


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


class _JsonFile:
    """Rows of a JSON file: one list of objects, or one object per line. Raises DataError if it cannot be read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._rows = _parse_json(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise DataError(f"cannot read {path} as JSON (a list of objects, or one object per line): {error}") from error
        self.num_rows = len(self._rows)
        self.columns: Sequence[str] = list(dict.fromkeys(name for row in self._rows for name in row))

    def row(self, index: int) -> dict[str, Any]:
        """The row at `index`."""
        return self._rows[index]

    def batches(self, column: str) -> Iterator[list[Any]]:
        """The values of a column, in one piece."""
        yield [row.get(column) for row in self._rows]


def _parse_json(text: str) -> list[dict[str, Any]]:
    if text.lstrip().startswith("["):
        rows = _parse_list(text)
    else:
        rows = []
        # Only "\n" separates lines: str.splitlines would also cut at characters that JSON allows inside strings.
        for number, line in enumerate(text.split("\n"), start=1):
            try:
                if line.strip():
                    rows.append(json.loads(line))
            except ValueError as error:
                raise ValueError(f"line {number}: {error}") from error
            except RecursionError:
                raise ValueError(f"row {len(rows)} (line {number}) is nested too deep") from None
    for index, row in enumerate(rows):
        if not isinstance(row, dict):
            raise ValueError(f"row {index} is a {type(row).__name__}, not an object")
    if _may_be_deep(text):
        for index, row in enumerate(rows):
            _check_depth(row, index)
    return rows


def _parse_list(text: str) -> list[Any]:
    """The entries of a JSON list. Raises ValueError for what is none, and for an entry that is nested too deep, with its number."""
    try:
        found: list[Any] = json.loads(text)
    except RecursionError:
        pass
    else:
        return found
    decoder = json.JSONDecoder()
    index = 0
    at = _NEXT.match(text, text.index("[") + 1).end()  # type: ignore[union-attr]
    try:
        while True:
            _, at = decoder.raw_decode(text, at)
            at = _NEXT.match(text, at).end()  # type: ignore[union-attr]
            index += 1
    except RecursionError:
        raise ValueError(f"row {index} is nested too deep") from None


def _may_be_deep(text: str) -> bool:
    """Whether brackets stand so close together that a row may be nested deeper than is read."""
    opened = deepest = 0
    for found in _BRACKET.finditer(text):
        opened += 1 if found[0] in "[{" else -1
        deepest = max(deepest, opened)
    return deepest > _MAX_DEPTH


def _check_depth(row: Any, index: int) -> None:
    """Raise ValueError if the row is nested deeper than what reads it can follow."""
    level = [row]
    depth = 0
    while level:
        depth += 1
        if depth > _MAX_DEPTH:
            raise ValueError(f"row {index} is nested deeper than {_MAX_DEPTH} levels")
        inner = [value for value in level if isinstance(value, dict | list)]
        level = [part for value in inner for part in (value.values() if isinstance(value, dict) else value)]


def _open(path: Path) -> _ParquetFile | _JsonFile:
    if path.suffix not in _ENDINGS:
        raise DataError(f"{path}: unknown extension {path.suffix!r}; data files are .parquet, .json or .jsonl")
    if not path.is_file():
        raise DataError(f"data file {path} does not exist")
    return _ParquetFile(path) if path.suffix == ".parquet" else _JsonFile(path)


@contextmanager
def _errors_name(path: Path) -> Iterator[None]:
    try:
        yield
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read {path} as parquet: {error}") from error


def choose_rows(num_rows: int, max_samples: int, shuffle: bool, seed: int | None) -> np.ndarray:
    """The row numbers to use, ascending: a random subset with `shuffle`, otherwise the first ones."""
    if max_samples == -1 or max_samples >= num_rows:
        return np.arange(num_rows)
    if not shuffle:
        return np.arange(max_samples)
    if seed is None:
        raise ConfigError(
            "choosing a random subset needs a number in data.seed, or data.shuffle=false for the first rows", key="data.seed"
        )
    import torch  # nothing else here needs it

    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(num_rows, generator=generator)[:max_samples].sort().values.numpy()


def read_column(files: RowFiles, column: str, rows: np.ndarray) -> Iterator[tuple[list[int], list[Any]]]:
    """Row numbers and values of a column in `rows` (their numbers ascend), some at a time."""
    for start, values in files.batches(column):
        low, high = np.searchsorted(rows, [start, start + len(values)])
        here = rows[low:high].tolist()
        if not here:
            continue
        if len(here) < len(values):
            positions = [row - start for row in here]
            values = values.take(pa.array(positions)) if isinstance(values, pa.Array) else [values[i] for i in positions]
        yield here, _objects(values, here, files)


def _objects(values: Values, rows: list[int], files: RowFiles) -> list[Any]:
    """Return the values of these rows as Python objects. Raises DataError for text that is not UTF-8."""
    if not isinstance(values, pa.Array):
        return values
    try:
        return values.to_pylist()
    except UnicodeDecodeError as error:
        if len(rows) > 1:  # find the one
            return [_objects(values[position : position + 1], [row], files)[0] for position, row in enumerate(rows)]
        raise DataError(f"{files.place(rows[0])}: the prompt is not valid UTF-8: {error}") from error


def row_sizes(files: RowFiles, columns: Sequence[str]) -> np.ndarray:
    """Bytes of text in these columns of each row; a file without one of them has none in it."""
    total = np.zeros(len(files), dtype=np.int64)
    for column in columns:
        for start, values in files.batches(column, missing_ok=True):
            total[start : start + len(values)] += text_sizes(values)
    return total


def text_sizes(values: Values) -> np.ndarray:
    """Bytes of all text in each value, however deep."""
    if not isinstance(values, pa.Array):
        return np.array([_text_size(value) for value in values], dtype=np.int64)
    kind = values.type
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return pc.fill_null(pc.binary_length(values), 0).to_numpy(zero_copy_only=False).astype(np.int64)
    if pa.types.is_struct(kind):
        return sum(map(text_sizes, values.flatten()), np.zeros(len(values), dtype=np.int64))
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        ends = np.cumsum(pc.fill_null(pc.list_value_length(values), 0).to_numpy(zero_copy_only=False))
        totals = np.concatenate([[0], np.cumsum(text_sizes(values.flatten()))])
        return np.diff(totals[ends], prepend=0)
    return np.zeros(len(values), dtype=np.int64)


def _text_size(value: Any) -> int:
    if isinstance(value, str):
        return len(value) if value.isascii() else len(value.encode(errors="surrogatepass"))
    return sum(map(_text_size, value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()))


def describe_data(config: Any, num_rows: int) -> dict[str, Any]:
    """Return what a checkpoint stores of the training data: the number of rows, and a digest of the files' sizes, beginnings and ends.

    `config` is the `data` section. Entries of its train_files that are no files, which only a user's dataset class reads, are left out.
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


def warn_of_other_data(then: Mapping[str, Any], now: Mapping[str, Any], say: Callable[[str], None]) -> None:
    """Warn if two results of `describe_data` are of different data. Older checkpoints have no digest to compare."""
    rows = (then["num_train_rows"], now["num_train_rows"])
    if then.get("train_files_digest", now["train_files_digest"]) == now["train_files_digest"] and rows[0] == rows[1]:
        return
    how = (
        f"now there are {rows[1]}; their order is a new one"
        if rows[0] != rows[1]
        else "the contents of data.train_files are others now"
    )
    say(f"warning: the checkpoint saw {rows[0]} training rows, {how}")
