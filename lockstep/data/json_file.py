"""Rows of a JSON file: one list of objects, or one object per line."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lockstep.errors import DataError


class JsonFile:
    """The rows of a file. Raises DataError when it cannot be read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._rows = _parse_json(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise DataError(f"cannot read {path} as JSON (a list of objects, or one object per line): {error}") from error
        self.num_rows = len(self._rows)
        self.columns: Sequence[str] = list(dict.fromkeys(name for row in self._rows for name in row))

    def row(self, index: int) -> dict[str, Any]:
        """The row at `index`."""
        return self._rows[index]

    def batches(self, column: str) -> Iterator[list[Any]]:
        """The values of a column, in one piece."""
        yield [row.get(column) for row in self._rows]


def _parse_json(text: str) -> list[dict[str, Any]]:
    if text.lstrip().startswith("["):
        rows = json.loads(text)
    else:
        rows = []
        # Only "\n" separates lines: str.splitlines would also cut at characters that JSON allows inside strings.
        for number, line in enumerate(text.split("\n"), start=1):
            try:
                if line.strip():
                    rows.append(json.loads(line))
            except ValueError as error:
                raise ValueError(f"line {number}: {error}") from error
    for index, row in enumerate(rows):
        if not isinstance(row, dict):
            raise ValueError(f"row {index} is a {type(row).__name__}, not an object")
    return rows
