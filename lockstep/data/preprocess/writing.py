"""Rows through a recipe into a parquet file, with an account of those that cannot be used."""

import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from lockstep.data.preprocess.reading import read_rows
from lockstep.data.preprocess.recipe import Recipe, SourceRow, UnusableRow

SplitOf = Callable[[SourceRow], str | None]

_ROW_GROUP = 10_000
_SHOWN = 100
"""Characters of an unusable row that are shown."""


@dataclass
class Account:
    """How many rows were read and written, and for each reason how many could not be used, with the first of them."""

    num_read: int = 0
    num_written: int = 0
    unusable: dict[str, tuple[int, str]] = field(default_factory=dict)

    def add_unusable(self, reason: str, example: str) -> None:
        count, first = self.unusable.get(reason, (0, example))
        self.unusable[reason] = (count + 1, first)

    def table(self) -> str:
        """Reason, count and first example of the rows that cannot be used, most frequent first."""
        rows = [(str(count), reason, first) for reason, (count, first) in self.unusable.items()]
        rows = [("count", "reason", "first example"), *sorted(rows, key=lambda row: -int(row[0]))]
        widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
        return "\n".join(f"  {count:>{widths[0]}}  {reason:<{widths[1]}}  {first}" for count, reason, first in rows)


def write_split(
    recipe: Recipe, instruction: str, split: str, paths: Sequence[Path], target: Path, split_of: SplitOf | None = None
) -> Account:
    """Convert the rows of `paths` and write them to `target`. Rows are numbered over all paths, whether they are used or not.

    With `split_of`, rows of other splits are passed over.
    """
    account = Account()
    with pq.ParquetWriter(target, recipe.schema) as writer:
        examples = _examples(recipe, instruction, split, _rows(paths, split, split_of), account)
        while rows := list(itertools.islice(examples, _ROW_GROUP)):
            writer.write_table(pa.Table.from_pylist(rows, recipe.schema))
            account.num_written += len(rows)
    return account


def _rows(paths: Sequence[Path], split: str, split_of: SplitOf | None) -> Iterator[tuple[Path, int, SourceRow | UnusableRow]]:
    """Every row with its file and its number there."""
    for path in paths:
        for position, row in enumerate(read_rows(path)):
            if split_of is None or isinstance(row, UnusableRow) or split_of(row) == split:
                yield path, position, row


def _examples(
    recipe: Recipe, instruction: str, split: str, rows: Iterable[tuple[Path, int, SourceRow | UnusableRow]], account: Account
) -> Iterator[dict[str, Any]]:
    for path, position, row in rows:
        index = account.num_read
        account.num_read += 1
        try:
            if isinstance(row, UnusableRow):
                raise row
            _check_unicode(row)
            example = recipe.convert(row, instruction)
        except UnusableRow as reason:
            account.add_unusable(str(reason), where_of(path, position, row))
            continue
        yield {
            "data_source": example.data_source or recipe.hub_id,
            "prompt": example.prompt,
            "ability": recipe.ability,
            **example.columns,
            "extra_info": {"split": split, "index": index, **example.extra_info},
        }


def _check_unicode(row: SourceRow) -> None:
    """JSON can spell halves of a character, which parquet cannot hold."""
    try:
        json.dumps(row, ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError:
        raise UnusableRow("not valid Unicode") from None


def where_of(path: Path, position: int, row: SourceRow | UnusableRow) -> str:
    """A row's file, its number there, and how it begins where it could be read."""
    if isinstance(row, UnusableRow):
        return f"{path.name} row {position}"
    shown = json.dumps(row, default=str)
    return f"{path.name} row {position}: " + (shown if len(shown) <= _SHOWN else shown[:_SHOWN] + "...")
