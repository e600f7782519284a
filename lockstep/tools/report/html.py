"""The HTML file of a report: the page's parts, and the data in blocks that the page unpacks when it needs them.

```text
block    kind + gzip of a payload
payload  JSON, or packed columns: uint32 length of the header, the header as JSON padded with spaces to a multiple of 8, then the columns,
         each from a multiple of 8. The header: [[name, type, count, offset after the header], ...]
```

No data is markup: a block is base64 in an element that no browser runs, and the page writes texts with `textContent` only. On top of that
the Content-Security-Policy allows the page's own script and style, by their hashes, and no connection; with `live` to its own server.
"""

import base64
import gzip
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import numpy as np

SCRIPTS = (
    "dom", "unpack", "store", "format", "charts", "overview", "stages", "settings", "alarms", "filters", "table", "strips", "detail",
    "samples", "keyboard", "main",
)  # fmt: skip
"""The page's scripts, in the order in which they are joined."""
STYLES = ("base", "overview", "samples")

_TYPES = {"uint8": "u1", "uint16": "u2", "int32": "i4", "float32": "f4", "float16": "f2"}
"""What a column may be -> its name in the header. float16 is read as uint16 by browsers that lack it."""


@dataclass(frozen=True)
class Block:
    """One piece of a report's data."""

    kind: str
    """head, settings, metrics, rows, texts, tokens or vocabulary: what page/store.js does with it."""
    data: bytes
    """The payload, compressed."""
    first: int = 0
    """The number of the first row in a block of texts or tokens: the page finds a row's block without unpacking others."""

    @property
    def base64(self) -> str:
        """The data in an alphabet that neither HTML nor JSON gives a meaning to."""
        return base64.b64encode(self.data).decode()


def json_block(kind: str, value: Any, first: int = 0) -> Block:
    """Return a block of JSON in ASCII: no surrogate, separator or control character of a text is written as itself."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return Block(kind, _compress(text.encode()), first)


def columns_block(kind: str, columns: Mapping[str, np.ndarray], first: int = 0) -> Block:
    """Return a block of packed columns, little-endian."""
    parts = []
    described = []
    offset = 0
    for name, column in columns.items():
        described.append([name, _TYPES[column.dtype.name], len(column), offset])
        data = column.astype(column.dtype.newbyteorder("<")).tobytes()
        padded = data + bytes(-len(data) % 8)
        parts.append(padded)
        offset += len(padded)
    header = json.dumps(described).encode()
    header += b" " * (-(len(header) + 4) % 8)
    payload = len(header).to_bytes(4, "little") + header + b"".join(parts)
    return Block(kind, _compress(payload), first)


def assemble(blocks: Sequence[Block], *, live: bool = False) -> Iterator[str]:
    """Yield the file, piece by piece. With `live` the page asks its server for the blocks that come later."""
    style = "\n".join(read_part(f"{name}.css") for name in STYLES)
    script = '\n"use strict";\n' + "\n".join(read_part(f"{name}.js") for name in SCRIPTS)
    own_server = "'self'" if live else "'none'"
    policy = "; ".join(
        [
            "default-src 'none'",
            f"script-src '{_digest(script)}'",
            f"style-src '{_digest(style)}'",
            f"connect-src {own_server}",
            "base-uri 'none'",
            "form-action 'none'",
        ]
    )
    head, body = read_part("page.html").split("<!-- body -->")
    yield head.replace("POLICY", policy).replace("MODE", "live" if live else "file")
    yield f"<style>{style}</style>\n</head>\n"
    yield body
    for block in blocks:
        yield f'<script type="text/plain" class="block" data-kind="{block.kind}" data-first="{block.first}">{block.base64}</script>\n'
    yield f"<script>{script}</script>\n</body>\n</html>\n"


def read_part(name: str) -> str:
    """Return the text of a file of the folder page/."""
    return (files("lockstep.tools.report") / "page" / name).read_text(encoding="utf-8")


def _compress(data: bytes) -> bytes:
    return gzip.compress(data, compresslevel=6, mtime=0)


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
