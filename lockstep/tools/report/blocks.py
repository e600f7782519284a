"""Blocks: the data of a report in pieces, each compressed by itself, which the page unpacks when it needs them.

```text
block    kind + gzip of a payload
payload  JSON, or packed columns: uint32 length of the header, the header as JSON padded with spaces to a multiple of 8, then the columns,
         each from a multiple of 8. The header: [[name, type, count, offset after the header], ...]
```
"""

import base64
import gzip
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

_TYPES = {"uint8": "u1", "uint16": "u2", "int32": "i4", "float32": "f4", "float16": "f2"}
"""What a column may be -> its name in the header. float16 is read as uint16 by browsers that lack it."""


@dataclass(frozen=True)
class Block:
    """One piece of a report's data."""

    kind: str
    """head, metrics, rows, texts, tokens or vocabulary: what page/store.js does with it."""
    data: bytes
    """The payload, compressed."""
    first: int = 0
    """Of texts and tokens, the number of the first row in it: the page finds a row's block without unpacking others."""

    @property
    def base64(self) -> str:
        """The data in an alphabet without a character that HTML or JSON could read as its own."""
        return base64.b64encode(self.data).decode()


def json_block(kind: str, value: Any, first: int = 0) -> Block:
    """A block of JSON. It is ASCII: no surrogate, separator or control character of a text is written as itself."""
    return Block(kind, _compress(json.dumps(value, separators=(",", ":"), allow_nan=False).encode()), first)


def columns_block(kind: str, columns: Mapping[str, np.ndarray], first: int = 0) -> Block:
    """A block of packed columns, little-endian."""
    parts, described, offset = [], [], 0
    for name, column in columns.items():
        described.append([name, _TYPES[column.dtype.name], len(column), offset])
        data = column.astype(column.dtype.newbyteorder("<")).tobytes()
        parts.append(data + bytes(-len(data) % 8))
        offset += len(parts[-1])
    header = json.dumps(described).encode()
    header += b" " * (-(len(header) + 4) % 8)
    return Block(kind, _compress(len(header).to_bytes(4, "little") + header + b"".join(parts)), first)


def _compress(data: bytes) -> bytes:
    return gzip.compress(data, compresslevel=6, mtime=0)
