"""`lockstep data show FILE --as sft|pairs|rl`: what each row became. See docs/data.md."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from lockstep.config.data import DataConfig
from lockstep.config.sft import TRAIN_ON
from lockstep.errors import DataError, as_command
from lockstep.models.source import SMOLLM2
from lockstep.utils.terminal import printable, say

if TYPE_CHECKING:
    from lockstep.data.token_rows import TokenRow
    from lockstep.data.training_rows import ReadRow, TrainingRows

_NUM_SUMMED = 1000
"""Rows, spread over the files, that the summary is made of."""
_GREEN = "\033[32m"
_PLAIN = "\033[0m"


@as_command
def main(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit status: 1 when a row cannot be used."""
    options = _parser().parse_args(list(arguments))
    return _show_prompts(options) if options.form == "rl" else _show_rows(options)


def _show_rows(options: argparse.Namespace) -> int:
    """Rows for supervised training, or pairs."""
    from lockstep.data.pairs import PairDataset
    from lockstep.data.supervised import SupervisedDataset
    from lockstep.utils.tokenizer import hf_tokenizer

    tokenizer = hf_tokenizer(options.model)
    shared: dict[str, Any] = {
        "max_length": options.max_length or sys.maxsize,
        "truncation": options.truncation,
        "use_template": not options.plain,
        "template_kwargs": options.template_kwargs,
        "try_rows": False,
    }
    dataset: TrainingRows
    if options.form == "sft":
        dataset = SupervisedDataset(options.files, tokenizer, train_on=options.train_on, **shared)
    else:
        dataset = PairDataset(options.files, tokenizer, skip_identical=True, **shared)
    for position in range(min(options.rows, len(dataset))):
        try:
            print(_shown(dataset.place(position), dataset.read([position])[0], tokenizer))
        except DataError as error:
            say(f"--- cannot be used: {error}\n")
    return _sum_up(dataset)


def _shown(place: str, read: ReadRow, tokenizer: Any) -> str:
    """A row of the files: its numbers, the prompt, and each response."""
    from lockstep.data.pairs import num_shared

    cut = num_shared(read.tokens) if len(read.tokens) > 1 else 0
    lines = [_marked(read.tokens[0].select(slice(0, cut)), tokenizer)] if cut else []
    for name, row in zip((", chosen", ", rejected") if cut else ("",), read.tokens, strict=True):
        lines += [
            f"--- {printable(place)}{name}: {_counts([row])}",
            _marked(row.select(slice(cut, None)), tokenizer, is_start=not cut),
        ]
    return "\n".join([*([f"--- {printable(place)}, prompt: {cut} tokens"] if cut else []), *lines, ""])


def _counts(rows: Sequence[TokenRow]) -> str:
    num_tokens = sum(map(len, rows))
    num_trained = sum(int(row.trained[1:].sum()) for row in rows)
    return f"{num_tokens} tokens, {num_trained} trained ({num_trained / num_tokens:.0%})"


def _marked(row: TokenRow, tokenizer: Any, is_start: bool = False) -> str:
    """The text of the tokens, with the trained ones marked."""
    is_terminal = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    opening, closing = (_GREEN, _PLAIN) if is_terminal else ("[[", "]]")
    text = ""
    for is_trained, pieces in groupby(_pieces(row, tokenizer, is_start), key=lambda piece: piece[0]):
        part = printable("".join(piece for _, piece in pieces))
        text += f"{opening}{part}{closing}" if is_trained else part
    return text


def _pieces(row: TokenRow, tokenizer: Any, is_start: bool) -> Iterator[tuple[bool, str]]:
    """For each token whether it is trained, and its characters; those of a token that was added are its name."""
    end = int(row.starts[0]) if len(row) else 0
    for i, (token, start, stop) in enumerate(zip(row.ids.tolist(), row.starts.tolist(), row.ends.tolist(), strict=True)):
        between = row.text[end:start]
        piece = row.text[max(start, end) : stop] if start < stop else tokenizer.convert_ids_to_tokens(token)
        yield bool(row.trained[i]) and not (is_start and i == 0), (" ... " if between.strip() else between) + piece
        end = max(end, stop)


def _sum_up(dataset: TrainingRows) -> int:
    rows: list[TokenRow] = []
    wrong: list[str] = []
    positions = dataset.spread(_NUM_SUMMED)
    for position in positions:
        try:
            rows += dataset.read([position])[0].tokens
        except DataError as error:
            wrong.append(str(error))
    lengths = sorted(map(len, rows)) or [0]
    say(f"{len(positions)} of {len(dataset)} rows read: {_counts(rows) if rows else 'none can be used'}")
    say(f"tokens in a row: median {lengths[len(lengths) // 2]}, most {lengths[-1]}")
    if skipped := getattr(dataset, "num_skipped", 0):
        say(f"left out, since chosen and rejected are the same: {skipped}")
    if wrong:
        say("\n".join([f"cannot be used: {len(wrong)}", *(f"  {reason}" for reason in wrong[:5])]))
    return 1 if wrong else 0


def _show_prompts(options: argparse.Namespace) -> int:
    """Prompts as RL reads them."""
    from lockstep.data.rl_dataset import RLHFDataset
    from lockstep.utils.tokenizer import hf_tokenizer

    tokenizer = hf_tokenizer(options.model)
    config = DataConfig(
        max_prompt_length=options.max_length or sys.maxsize,
        truncation=options.truncation,
        apply_chat_template_kwargs=options.template_kwargs,
    )
    dataset = RLHFDataset(options.files, tokenizer, config)
    for position in range(min(options.rows, len(dataset))):
        item = dataset[position]
        say(f"--- row {item['index']}: {len(item['prompt_ids'])} tokens, data_source {item.get('data_source')}")
        say(f"{tokenizer.decode(item['prompt_ids'])}\n")
    say(f"{len(dataset)} rows")
    return 0


def _json_object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f'{text} is no JSON object such as {{"enable_thinking": false}}')
    return found


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="lockstep data", description="Look at data as training sees it.")
    show = parser.add_subparsers(dest="command", required=True).add_parser("show", help="what each row became")
    show.add_argument("files", nargs="+", metavar="FILE", help="parquet, json or jsonl")
    show.add_argument("--as", dest="form", choices=("sft", "pairs", "rl"), required=True, help="what the rows are for")
    show.add_argument("--model", default=SMOLLM2, help=f"whose tokenizer: a folder or a hub id (default {SMOLLM2})")
    show.add_argument("--rows", type=int, default=3, help="how many rows are shown (default 3)")
    show.add_argument("--train-on", choices=TRAIN_ON, default="assistant", help="with --as sft (default assistant)")
    show.add_argument("--max-length", type=int, help="the most tokens of a row, or of a prompt with --as rl (default: any)")
    show.add_argument("--truncation", choices=("error", "left", "right", "middle"), default="error", help="(default error)")
    show.add_argument(
        "--template-kwargs",
        type=_json_object,
        default={},
        metavar="JSON",
        help='for the chat template, as {"enable_thinking": false}',
    )
    show.add_argument("--plain", action="store_true", help="take prompts that are strings as they are, without the chat template")
    return parser
