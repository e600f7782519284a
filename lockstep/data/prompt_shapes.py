"""What a column of prompts says of itself without becoming Python objects: sizes, roles, and which rows need a look.

A million prompts are checked in this way at start; only the rows marked here are looked at one by one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

UNICODE_GROWTH = 3
"""How many times longer, in UTF-8, a Unicode normal form (NFC, NFD) can be than text that is not plain ASCII."""


@dataclass(frozen=True, slots=True)
class PromptShapes:
    """Facts about neighbouring prompts, one entry a row."""

    num_bytes: np.ndarray
    """Bytes of the text after Unicode normalisation, at most: UTF-8 bytes of the string, or of all contents together."""
    roles: np.ndarray
    """Which of `role_lists` the messages have; -1 for a string."""
    role_lists: list[tuple[str, ...]]
    """The different sequences of roles."""
    needs_look: np.ndarray
    """True where the prompt may be invalid, or is more than text (other keys, content in parts). Its `num_bytes` is a rough size then."""


def prompt_shapes(prompts: pa.Array | list[Any]) -> PromptShapes:
    """The shapes of prompts that are strings or lists of {role, content}. Never raises: what it cannot read needs a look."""
    try:
        array = prompts if isinstance(prompts, pa.Array) else pa.array(prompts)
        if pa.types.is_dictionary(array.type):
            array = array.dictionary_decode()
        array.validate(full=True)  # Arrow reads text from parquet without checking that it is UTF-8
        if _is_text(array.type):
            return _of_strings(array)
        if pa.types.is_list(array.type) or pa.types.is_large_list(array.type):
            return _of_messages(array)
    except (pa.ArrowException, UnicodeEncodeError, OverflowError, TypeError):
        pass
    return _unknown(prompts)


def _of_strings(array: pa.Array) -> PromptShapes:
    sizes = _sizes(array)
    return PromptShapes(sizes, np.full(len(array), -1), [], sizes == 0)


def _of_messages(array: pa.Array) -> PromptShapes:
    message = array.type.value_type
    names = {field.name for field in message} if pa.types.is_struct(message) else set()
    if not {"role", "content"} <= names or not all(_is_text(message.field(name).type) for name in ("role", "content")):
        return _unknown(array)
    num_messages = pc.fill_null(pc.list_value_length(array), 0).to_numpy(zero_copy_only=False).astype(np.int64)
    ends = np.cumsum(num_messages)
    messages = array.flatten()
    columns = {name: pc.struct_field(messages, name) for name in names}
    role, content = columns.pop("role"), columns.pop("content")
    odd = _nulls(role) | _nulls(content)
    for other in columns.values():
        odd |= ~_nulls(other)
    needs_look = (num_messages == 0) | (_sum_rows(odd, ends, num_messages) > 0)

    encoded = pc.fill_null(role, "").dictionary_encode()
    codes, role_names = encoded.indices.to_numpy(zero_copy_only=False), encoded.dictionary.to_pylist()
    roles = np.full(len(array), -1)
    role_lists: list[tuple[str, ...]] = []
    for length in np.unique(num_messages[~needs_look]):
        rows = np.flatnonzero((num_messages == length) & ~needs_look)
        table = codes[(ends[rows] - length)[:, None] + np.arange(length)]
        kinds, inverse = (table[:1], 0) if (table == table[0]).all() else np.unique(table, axis=0, return_inverse=True)
        roles[rows] = len(role_lists) + np.asarray(inverse).reshape(-1)
        role_lists += [tuple(role_names[code] for code in kind) for kind in kinds]
    return PromptShapes(_sum_rows(_sizes(content), ends, num_messages), roles, role_lists, needs_look)


def _unknown(prompts: pa.Array | list[Any]) -> PromptShapes:
    sizes = [prompts.nbytes // len(prompts)] * len(prompts) if isinstance(prompts, pa.Array) else [len(repr(p)) for p in prompts]
    return PromptShapes(np.array(sizes, np.int64), np.full(len(prompts), -1), [], np.ones(len(prompts), bool))


def _is_text(kind: pa.DataType) -> bool:
    return pa.types.is_string(kind) or pa.types.is_large_string(kind)


def _nulls(array: pa.Array) -> np.ndarray:
    return pc.is_null(array).to_numpy(zero_copy_only=False) if array.null_count else np.zeros(len(array), bool)


def _sizes(texts: pa.Array) -> np.ndarray:
    """Bytes of each text (0 for null) after normalisation, at most: those of characters that are not ASCII may be `UNICODE_GROWTH` times
    as many.
    """
    num_bytes, num_characters = (
        pc.fill_null(count(texts), 0).to_numpy(zero_copy_only=False).astype(np.int64)
        for count in (pc.binary_length, pc.utf8_length)
    )
    # A character that is not ASCII has at least one byte beyond its first, so at most half of its bytes are first ones.
    return num_bytes + (UNICODE_GROWTH - 1) * 2 * (num_bytes - num_characters)


def _sum_rows(values: np.ndarray, ends: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Sums of `lengths[i]` neighbouring values that end before `ends[i]`."""
    total = np.concatenate([[0], np.cumsum(values, dtype=np.int64)])
    return total[ends] - total[ends - lengths]
