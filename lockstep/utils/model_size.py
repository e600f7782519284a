"""How large a model is, read from the headers of its files."""

import json
import math
import struct
from pathlib import Path


def count_parameters(path: str) -> int | None:
    """Parameters in the safetensors files of a local folder; None when there are none to read (a hub id, another format)."""
    return sum(map(_parameters_in, Path(path).glob("*.safetensors"))) or None


def _parameters_in(file: Path) -> int:
    with file.open("rb") as stream:
        (header_size,) = struct.unpack("<Q", stream.read(8))
        header = json.loads(stream.read(header_size))
    return sum(math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")
