"""How much text each row of some files has: what tells the longest rows without tokenising."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from lockstep.data.row_files import RowFiles, Values


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
