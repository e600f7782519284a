"""`manifest.json`: size and SHA-256 of every file of a checkpoint, written last. What was damaged since then has a name."""

import hashlib
import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from lockstep.errors import DataError

MANIFEST = "manifest.json"
_READ_BY_US = (".json", ".safetensors")
"""Files of these kinds that the manifest does not list could take the place of others."""

Entry = dict[str, Any]
"""{"size": bytes, "sha256": hex digits} of one file."""


def entry_of(file: Path) -> Entry:
    """Size and checksum of a file as it is now."""
    with file.open("rb") as opened:
        return {"size": file.stat().st_size, "sha256": hashlib.file_digest(opened, "sha256").hexdigest()}


def write_manifest(folder: Path, known: Mapping[str, Entry]) -> None:
    """Write the manifest of all files in `folder`. `known` are entries, by path in the folder, that need not be computed again."""
    entries = {name: known.get(name) or entry_of(folder / name) for name in _files(folder)}
    (folder / MANIFEST).write_text(json.dumps({"files": entries}, indent=1))


def check_manifest(folder: Path) -> None:
    """Raise DataError, naming a file, unless every file is there, with the size and the checksum that it was written with."""
    try:
        entries = json.loads((folder / MANIFEST).read_text())["files"]
        expected = {name: (int(entry["size"]), str(entry["sha256"])) for name, entry in entries.items()}
    except FileNotFoundError as error:
        raise DataError(f"{folder} has no {MANIFEST}: expected a global_step_N folder that was written to its end") from error
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(f"{folder / MANIFEST} is damaged: {error!r}") from error
    for name, (size, _) in expected.items():
        if not (folder / name).is_file():
            raise DataError(f"{folder / name} is missing")
        found = (folder / name).stat().st_size
        if found != size:
            raise DataError(f"{folder / name} has {found} bytes, but was written with {size}: it was cut short or changed")
    for name in _files(folder):
        if name not in expected and name.endswith(_READ_BY_US):
            raise DataError(f"{folder / name} was added after the checkpoint was written: remove it")
    with ThreadPoolExecutor(8) as pool:  # hashing leaves Python free
        for name, entry in zip(expected, pool.map(lambda name: entry_of(folder / name), expected), strict=True):
            if entry["sha256"] != expected[name][1]:
                raise DataError(f"{folder / name} is damaged: its SHA-256 is not the one that it was written with")


def _files(folder: Path) -> list[str]:
    found = (path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*")) if path.is_file())
    return [name for name in found if name != MANIFEST]
