"""Rows of a JSON file: one list of objects, or one object per line."""

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lockstep.errors import DataError

_MAX_DEPTH = 200
"""Levels of lists and objects in a row: templates and whatever else follows them ends at about 1,000."""
_NEXT = re.compile(r"[\s,]*")
_BRACKET = re.compile(r"[\[\]{}]")


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
        rows = _parse_list(text)
    else:
        rows = []
        # Only "\n" separates lines: str.splitlines would also cut at characters that JSON allows inside strings.
        for number, line in enumerate(text.split("\n"), start=1):
            try:
                if line.strip():
                    rows.append(json.loads(line))
            except ValueError as error:
                raise ValueError(f"line {number}: {error}") from error
            except RecursionError:
                raise ValueError(f"row {len(rows)} (line {number}) is nested too deep") from None
    for index, row in enumerate(rows):
        if not isinstance(row, dict):
            raise ValueError(f"row {index} is a {type(row).__name__}, not an object")
    if _may_be_deep(text):
        for index, row in enumerate(rows):
            _check_depth(row, index)
    return rows


def _parse_list(text: str) -> list[Any]:
    """The entries of a JSON list. Raises ValueError for what is none, and for an entry that is nested too deep, with its number."""
    try:
        found: list[Any] = json.loads(text)
    except RecursionError:
        pass
    else:
        return found
    decoder = json.JSONDecoder()
    index = 0
    at = _NEXT.match(text, text.index("[") + 1).end()  # type: ignore[union-attr]
    try:
        while True:
            _, at = decoder.raw_decode(text, at)
            at = _NEXT.match(text, at).end()  # type: ignore[union-attr]
            index += 1
    except RecursionError:
        raise ValueError(f"row {index} is nested too deep") from None


def _may_be_deep(text: str) -> bool:
    """Whether brackets stand so close together that a row may be nested deeper than is read."""
    opened = deepest = 0
    for found in _BRACKET.finditer(text):
        opened += 1 if found[0] in "[{" else -1
        deepest = max(deepest, opened)
    return deepest > _MAX_DEPTH


def _check_depth(row: Any, index: int) -> None:
    """Raise ValueError if the row is nested deeper than what reads it can follow."""
    level = [row]
    depth = 0
    while level:
        depth += 1
        if depth > _MAX_DEPTH:
            raise ValueError(f"row {index} is nested deeper than {_MAX_DEPTH} levels")
        inner = [value for value in level if isinstance(value, dict | list)]
        level = [part for value in inner for part in (value.values() if isinstance(value, dict) else value)]
