"""The rows of one file: parquet, JSON, JSON lines, the latter two also compressed with gzip.

A row that cannot be read is given as the UnusableRow that says why, in its place; a file that cannot be read raises DataError.
"""

import gzip
import json
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from lockstep.data.preprocess.recipe import UnusableRow
from lockstep.errors import DataError

SUFFIXES = (".parquet", ".jsonl", ".json", ".jsonl.gz", ".json.gz")

_BATCH_ROWS = 1024


def read_rows(path: Path) -> Iterator[dict[str, Any] | UnusableRow]:
    """Every row of the file, in order."""
    if not path.name.endswith(SUFFIXES):
        raise DataError(f"{path}: a data file ends in one of {', '.join(SUFFIXES)}")
    try:
        if path.suffix == ".parquet":
            yield from _parquet_rows(path)
        else:
            with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
                yield from _json_lines(file) if ".jsonl" in path.name else _json_rows(file.read())
    except (pa.ArrowException, OSError, EOFError, zlib.error, ValueError) as error:
        raise DataError(f"cannot read {path}: {error}") from error


def _parquet_rows(path: Path) -> Iterator[dict[str, Any] | UnusableRow]:
    with pq.ParquetFile(path, pre_buffer=False) as file:
        for batch in file.iter_batches(_BATCH_ROWS):
            try:
                yield from batch.to_pylist()
            except UnicodeDecodeError:
                for position in range(len(batch)):
                    try:
                        yield batch.slice(position, 1).to_pylist()[0]
                    except UnicodeDecodeError:
                        yield UnusableRow("not valid UTF-8")


def _json_rows(content: bytes) -> Iterator[dict[str, Any] | UnusableRow]:
    """A list of objects, one object, or one object per line."""
    try:
        whole = json.loads(content)
    except ValueError:
        if content.lstrip().startswith(b"["):
            raise
        yield from _json_lines(content.split(b"\n"))
        return
    for row in whole if isinstance(whole, list) else [whole]:
        yield row if isinstance(row, dict) else UnusableRow("not a JSON object")


def _json_lines(lines: Iterable[bytes]) -> Iterator[dict[str, Any] | UnusableRow]:
    for line in lines:
        if line.strip():
            try:
                row = json.loads(line.decode())
            except UnicodeDecodeError:
                yield UnusableRow("not valid UTF-8")
            except ValueError:
                yield UnusableRow("not JSON")
            else:
                yield row if isinstance(row, dict) else UnusableRow("not a JSON object")
