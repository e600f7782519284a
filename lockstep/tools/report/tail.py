"""A file of JSON lines that grows while it is read."""

import json
import os
from pathlib import Path
from typing import Any

NOT_FINITE = {"NaN": "nan", "Infinity": "inf", "-Infinity": "-inf"}
"""What json writes for a number that is not finite, which is no JSON -> how the tracker of a run writes it (observability/trackers.py)."""


class JsonLines:
    """Reads each whole line of `path` once. A file that is not there yet has none."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.num_unreadable = 0
        """Lines that are no JSON object."""
        self._offset = 0
        self._identity: tuple[int, int] | None = None

    def was_rewritten(self) -> bool:
        """Whether what was read is not the beginning of the file any more: a run that goes on from a checkpoint drops later steps."""
        try:
            status = os.stat(self.path)
        except FileNotFoundError:
            return self._identity is not None
        return self._identity is not None and ((status.st_dev, status.st_ino) != self._identity or status.st_size < self._offset)

    def read_new(self) -> list[dict[str, Any]]:
        """The lines that were completed since the last call."""
        try:
            with self.path.open("rb") as file:
                status = os.fstat(file.fileno())
                self._identity = status.st_dev, status.st_ino
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        rows = [self._row(line) for line in whole.splitlines() if line.strip()]
        return [row for row in rows if row is not None]

    def _row(self, line: bytes) -> dict[str, Any] | None:
        try:
            row = json.loads(line, parse_constant=NOT_FINITE.get)
        except ValueError:
            row = None
        if not isinstance(row, dict):
            self.num_unreadable += 1
            return None
        return row
