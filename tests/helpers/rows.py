"""Rows written to files of any format."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    """Write rows in the format of the file's name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    if path.name.endswith(".parquet"):
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif path.name.endswith(".gz"):
        path.write_bytes(gzip.compress(lines.encode()))
    else:
        path.write_text(json.dumps(rows) if path.name.endswith(".json") else lines)
    return path
