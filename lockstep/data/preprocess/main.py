"""`lockstep preprocess DATASET --source PATH_OR_HUB_ID --out FOLDER`: rows through a recipe into parquet files, with an account of
those that cannot be used."""

import argparse
import itertools
import json
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from lockstep.data.preprocess import chat, full_hh_rlhf, gsm8k, hellaswag, math_dataset
from lockstep.data.preprocess.recipe import Recipe, SourceRow, UnusableRow
from lockstep.data.preprocess.sources import SourceFiles, find_files, read_rows
from lockstep.errors import DataError, as_command
from lockstep.utils.terminal import say

RECIPES = {
    "gsm8k": gsm8k.RECIPE,
    "math": math_dataset.RECIPE,
    "hellaswag": hellaswag.RECIPE,
    "chat": chat.RECIPE,
}
PREFERENCES = {"full_hh_rlhf": full_hh_rlhf.RECIPES, "ultrafeedback": full_hh_rlhf.ULTRAFEEDBACK}
"""Datasets that are written in several forms: `--split` names one."""

TRAIN_FILE = "train.parquet"
HELD_OUT_FILE = "test.parquet"

SplitOf = Callable[[SourceRow], str | None]
_ROW_GROUP = 10_000
_SHOWN = 100
"""Characters of an unusable row that are shown."""


@as_command
def main(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit status."""
    parsed = _parser().parse_args(list(arguments))
    if parsed.dataset in PREFERENCES:
        preprocess(PREFERENCES[parsed.dataset][parsed.split], parsed.source, Path(parsed.out))
    else:
        preprocess(RECIPES[parsed.dataset], parsed.source, Path(parsed.out), getattr(parsed, "instruction", None))
    return 0


def recipe_main(recipe: Recipe, arguments: Sequence[str]) -> int:
    """Run the command for one recipe, also one of your own (examples/data_preprocess/mbpp.py); return the exit status."""

    @as_command
    def main_of_recipe(arguments: Sequence[str]) -> int:
        parser = argparse.ArgumentParser(description=f"Make the parquet files of {recipe.hub_id}.")
        _add_arguments(parser, recipe)
        parsed = parser.parse_args(list(arguments))
        preprocess(recipe, parsed.source, Path(parsed.out), getattr(parsed, "instruction", None))
        return 0

    return main_of_recipe(arguments)


def preprocess(recipe: Recipe, sources: Sequence[str] | None, out: Path, instruction: str | None = None) -> None:
    """Write `out`/train.parquet and `out`/test.parquet (the held-out split, whatever the source calls it), and say what came of each row.

    A source without one of the splits gives one file. `sources` are folders, files or hub ids; None is the dataset on the hub.
    `instruction` replaces the recipe's. Raises DataError when a source cannot be read or no row of a split can be used; then nothing is
    written.
    """
    found = find_files(sources or [recipe.hub_id], recipe.secondary)
    split_of = None if found.is_named else recipe.split_of
    if split_of:
        found = SourceFiles(dict.fromkeys(("train", "validation", "test"), found.splits["train"]), [])
    held_out = next((name for name in recipe.held_out if name in found.splits), None)
    targets = {split: target for split, target in (("train", TRAIN_FILE), (held_out, HELD_OUT_FILE)) if split in found.splits}
    instruction = recipe.instruction if instruction is None else instruction
    accounts = {}
    try:
        out.mkdir(parents=True, exist_ok=True)
        # In the same folder, so that moving a finished file is one step; nothing is moved before everything is finished.
        with tempfile.TemporaryDirectory(dir=out, prefix=".preprocess-") as unfinished:
            for split, target in targets.items():
                paths = [file.fetch() for file in found.splits[str(split)]]
                account = accounts[split] = write_split(recipe, instruction, str(split), paths, Path(unfinished) / target, split_of)
                if not account.num_written and (account.num_read or not split_of):
                    reasons = f"\n{account.table()}" if account.unusable else " there are none"
                    raise DataError(f"no row of the split {split!r} can be used:{reasons}")
            targets = {split: target for split, target in targets.items() if accounts[split].num_written}
            if not targets:
                raise DataError("no row belongs to a split for training or validation")
            for target in targets.values():
                (Path(unfinished) / target).replace(out / target)
    except OSError as error:
        raise DataError(f"cannot write to {out}: {error.strerror or error}; name another folder with --out") from error

    for split, target in targets.items():
        account = accounts[split]
        say(f"{split}: {account.num_read} rows read, {account.num_written} written to {out / target}")
        if account.unusable:
            say(f"{split}: rows that cannot be used: {account.num_read - account.num_written}\n{account.table()}")
    for name in {TRAIN_FILE, HELD_OUT_FILE} - set(targets.values()):
        if (out / name).is_file():
            say(f"warning: {out / name} was there before; this source has no such split, and the file is not of it")
    not_used = [*(f"split {name}" for name in found.splits if name not in targets), *found.unused]
    if not_used:
        say(f"not used: {', '.join(not_used[:10])}{f' and {len(not_used) - 10} more' if len(not_used) > 10 else ''}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="lockstep preprocess", description="Make the parquet files that training reads.")
    datasets = parser.add_subparsers(dest="dataset", required=True, metavar="DATASET")
    for name, recipe in [*RECIPES.items(), *((name, forms["rl"]) for name, forms in PREFERENCES.items())]:
        command = datasets.add_parser(name, help=f"{recipe.hub_id} ({recipe.ability})" if recipe.is_on_hub else recipe.about)
        if name in PREFERENCES:
            _add_arguments(command, recipe, has_instruction=False)
            command.add_argument(
                "--split", choices=list(PREFERENCES[name]), default="rl", help="what the rows are for (default rl)"
            )
        else:
            _add_arguments(command, recipe, has_instruction=recipe.has_prompt)
    return parser


def _add_arguments(parser: argparse.ArgumentParser, recipe: Recipe, has_instruction: bool = True) -> None:
    default = f" (default {recipe.hub_id})" if recipe.is_on_hub else ""
    parser.add_argument(
        "--source", nargs="+", required=not recipe.is_on_hub, help=f"folders, files or the id of a dataset on the hub{default}"
    )
    parser.add_argument("--out", required=True, help=f"folder for {TRAIN_FILE} and {HELD_OUT_FILE}")
    if has_instruction:
        parser.add_argument("--instruction", help="text after the question, instead of our own; '' for none")


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
