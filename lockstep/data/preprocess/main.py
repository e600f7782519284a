"""`lockstep preprocess DATASET --source PATH_OR_HUB_ID --out FOLDER`."""

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

from lockstep.data.preprocess import chat, full_hh_rlhf, gsm8k, hellaswag, humaneval, math_dataset, mbpp
from lockstep.data.preprocess.recipe import Recipe
from lockstep.data.preprocess.sources import SourceFiles, find_files
from lockstep.data.preprocess.writing import write_split
from lockstep.errors import DataError, as_command
from lockstep.utils.printable import say

RECIPES = {
    "gsm8k": gsm8k.RECIPE,
    "math": math_dataset.RECIPE,
    "hellaswag": hellaswag.RECIPE,
    "humaneval": humaneval.RECIPE,
    "mbpp": mbpp.RECIPE,
    "chat": chat.RECIPE,
}
PREFERENCES = {"full_hh_rlhf": full_hh_rlhf.RECIPES, "ultrafeedback": full_hh_rlhf.ULTRAFEEDBACK}
"""Datasets that are written in several forms: `--split` names one."""

TRAIN_FILE = "train.parquet"
HELD_OUT_FILE = "test.parquet"


@as_command
def main(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit status."""
    parsed = _parser().parse_args(list(arguments))
    if parsed.dataset in PREFERENCES:
        preprocess(PREFERENCES[parsed.dataset][parsed.split], parsed.source, Path(parsed.out))
    else:
        preprocess(RECIPES[parsed.dataset], parsed.source, Path(parsed.out), getattr(parsed, "instruction", None))
    return 0


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
        on_hub = "/" in recipe.hub_id
        command = datasets.add_parser(name, help=f"{recipe.hub_id} ({recipe.ability})" if on_hub else recipe.about)
        default = f" (default {recipe.hub_id})" if on_hub else ""
        command.add_argument(
            "--source", nargs="+", required=not on_hub, help=f"folders, files or the id of a dataset on the hub{default}"
        )
        command.add_argument("--out", required=True, help=f"folder for {TRAIN_FILE} and {HELD_OUT_FILE}")
        if name in PREFERENCES:
            command.add_argument(
                "--split", choices=list(PREFERENCES[name]), default="rl", help="what the rows are for (default rl)"
            )
        elif recipe.has_prompt:
            command.add_argument("--instruction", help="text after the question, instead of our own; '' for none")
    return parser
