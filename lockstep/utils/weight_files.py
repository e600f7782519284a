"""Are the files of a model's weights whole? Known from their headers, before anything is loaded."""

import json
from pathlib import Path

from lockstep.errors import DataError

_MAX_HEADER = 100 << 20
"""Longer ones are no headers: safetensors refuses them too."""


def check_weight_files(folder: Path) -> None:
    """Raise DataError where a safetensors file of the folder is cut short or is none, or one that its index names is not there."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            named = set(json.loads(index.read_text())["weight_map"].values())
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(f"{index} cannot be read as an index of weights ({error!r}); copy or download it again") from error
        missing = sorted(name for name in named if not (folder / name).is_file())
        if missing:
            raise DataError(
                f"{folder} lacks {len(missing)} of {len(named)} files of weights, first {missing[0]}; copy or download it again"
            )
    for file in sorted(folder.glob("*.safetensors")):
        size, whole = file.stat().st_size, _whole_size(file)
        if whole is None:
            raise DataError(f"{file} is not a safetensors file: it has {size:,} bytes and no header; copy or download it again")
        if size != whole:
            raise DataError(
                f"{file} is damaged: it has {size:,} bytes, and its header tells of {whole:,}; copy or download it again"
            )


def _whole_size(file: Path) -> int | None:
    """How many bytes the file has by its own header; None where it has none."""
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if not 2 <= length <= _MAX_HEADER:
            return None
        try:
            entries = json.loads(stream.read(length))
            ends = [entry["data_offsets"][1] for name, entry in entries.items() if name != "__metadata__"]
        except (ValueError, KeyError, TypeError, AttributeError, IndexError):
            return None
    return 8 + length + max(ends, default=0)
