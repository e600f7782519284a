"""A file of JSON lines that grows while it is read."""

import json
import math
import os
from pathlib import Path
from typing import Any

_NOT_FINITE = {"NaN": "nan", "Infinity": "inf", "-Infinity": "-inf"}
"""What json writes for a number that is not finite, which is no JSON -> how the tracker of a run writes it (observability/trackers.py)."""
_MAX_DEPTH = 100


def read_json(text: str | bytes) -> Any:
    """Return the value, with numbers that are not finite as texts and whole numbers beyond floats' as floats.

    Raises ValueError for what is no JSON, and for values nested too deep.
    """
    try:
        value = json.loads(text, parse_constant=_NOT_FINITE.get, parse_float=_number, parse_int=_number)
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error
    if _is_deep(value):
        raise ValueError(f"it is nested deeper than {_MAX_DEPTH} levels")
    return value


def _number(digits: str) -> int | float | str:
    if digits.lstrip("-").isdecimal() and len(digits) <= 15:
        return int(digits)
    number = float(digits)
    return number if math.isfinite(number) else str(number)


def _is_deep(value: Any) -> bool:
    level = [value]
    for _ in range(_MAX_DEPTH):
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
        if not level:
            return False
    return True


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
            row = read_json(line)
        except ValueError:
            row = None
        if not isinstance(row, dict):
            self.num_unreadable += 1
            return None
        return row
