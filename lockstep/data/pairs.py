"""PairDataset: files of preferences as rows to train on, two per pair; and of single answers with a label."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from lockstep.data.conversations import MarkedText, Message, choose_messages, read_messages
from lockstep.data.encoder import truncate
from lockstep.data.row_files import row_sizes
from lockstep.data.token_rows import TokenRow, TooLong, columns, fit, up_to_last_trained
from lockstep.data.training_rows import FileRow, TrainingRows
from lockstep.errors import DataError
from lockstep.protocol import DataProto

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_HH_TURN = "\n\nAssistant:"
_HH_USER = "\n\nHuman:"
_LAST_WORD = re.compile(r"\s?\S*\Z")


class PairDataset(TrainingRows):
    """Rows with `chosen` and `rejected`, both strings or both messages, and `prompt`, a string or messages; `margin` and `tools` may
    stand beside. Or, when the files have no `chosen`, rows with `prompt`, `completion` (or `response`) and `label`, true for a good one.

    Without `prompt`, and where the messages of chosen and rejected do not begin with the assistant, what both begin with is the prompt:
    leading messages, or text up to the last common `Assistant:` of Anthropic's form, or up to the last common blank. The assistant's
    messages after it are trained. Every response ends with a special token: the template's end of turn, else the tokenizer's end token.

    With `whole` the response goes on to the end of what the template writes, as a reward model reads it (ScoredText).

    Pairs without `prompt` whose users say different things are warned of, once, with their number.

    A pair whose answers are the same is an error, or is left out with `skip_identical`; `num_skipped` counts those. See TrainingRows for
    the other arguments. `truncation` left and middle cut the prompt, the same way in both rows; right cuts the ends of the responses.
    """

    columns_read = ("prompt", "chosen", "rejected", "completion", "response", "tools")

    def __init__(
        self,
        files: str | Path | Sequence[str | Path],
        tokenizer: PreTrainedTokenizerBase,
        *,
        skip_identical: bool = False,
        whole: bool = False,
        **options: Any,
    ) -> None:
        self._skip_identical = skip_identical
        self.num_skipped = 0
        self._whole = whole
        super().__init__(files, tokenizer, **options)
        if self.is_paired and options.get("try_rows", True):
            self._warn_of_other_questions()

    @property
    def is_paired(self) -> bool:
        """Whether a position is a pair, two rows of a batch, or one answer with a label, one row."""
        return "chosen" in self._files.columns

    def batch(self, positions: Sequence[int]) -> DataProto:
        """The pairs at these positions, two rows each, chosen then rejected; or the labelled answers, one row each. The columns are

        - `prompts`: the same in both rows of a pair; `responses`; `response_mask`: 1 where a token of the response is trained;
        - `is_chosen` (dense, bool): chosen, or the label;
        - `margin` (dense, float32): the pair's, 0 where it has none;
        - `uid` (object): the same in both rows of a pair; `index` (object): the row's number in the files.

        Raises DataError for a row that cannot be used.
        """
        read = self.read(positions)
        rows = [(place, part, row) for place, part in enumerate(read) for row in part.tokens]
        cuts = [num_shared(part.tokens) for _, part, _ in rows]
        labels = [True, False] * len(read) if self.is_paired else [part.row["label"] for part in read]
        tensors = columns([row for _, _, row in rows], cuts) | {
            "is_chosen": torch.tensor(labels),
            "margin": torch.tensor([part.row.get("margin") or 0.0 for _, part, _ in rows], dtype=torch.float32),
        }
        objects = {"uid": [str(place) for place, _, _ in rows], "index": [part.index for _, part, _ in rows]}
        return DataProto.from_dict(tensors, objects, {"pad_token_id": self._tokenizer.pad_token_id})

    def same_prompts(self) -> np.ndarray:
        """A number for each position, the same where `prompt` is the same; another for each row that has none, or tools beside it."""
        numbers = np.arange(len(self._files))
        if "tools" not in self._files.columns:
            first: dict[str, int] = {}
            for start, values in self._files.batches("prompt", missing_ok=True):
                for row, prompt in enumerate(values if isinstance(values, list) else values.to_pylist(), start):
                    if prompt is not None:
                        numbers[row] = first.setdefault(json.dumps(prompt, sort_keys=True, default=str), row)
        return numbers[self._rows]

    def mark(self, row: FileRow) -> list[MarkedText]:
        if not self.is_paired:
            return [self._answer(row, row.get("completion") if row.get("completion") is not None else row.get("response"))]
        chosen: Any = row["chosen"]
        rejected: Any = row.get("rejected")
        margin = row.get("margin")
        if chosen is None and rejected is None and row.get("label") is not None:
            raise DataError("an answer with a label among pairs; train on pairs alone, or (kto) on answers with a label alone")
        if not any(isinstance(chosen, kind) and isinstance(rejected, kind) for kind in (str, list)):
            raise DataError(f"chosen and rejected must both be strings or both messages, not {chosen!r} and {rejected!r}")
        if margin is not None and not isinstance(margin, int | float):
            raise DataError(f"margin must be a number, not {margin!r}")
        if isinstance(chosen, list) and (row.get("prompt") is None or not _begins_with_assistant(chosen)):
            both = [read_messages(chosen), read_messages(rejected)]
            start = num_shared_messages(*both)
            return [self._chat(messages, start, row) for messages in both]
        if row.get("prompt") is None:
            cut = len(shared_text(chosen, rejected))
            return [MarkedText(text, ((cut, len(text)),), False) for text in (chosen, rejected)]
        return [self._answer(row, chosen), self._answer(row, rejected)]

    def finish(self, rows: list[TokenRow]) -> list[TokenRow]:
        cut = [up_to_last_trained(row) for row in rows]
        rows = [self._tokenize.ended(row) for row in (rows if self._whole else cut)]
        num_prompt = num_shared(rows)
        longest = max(map(len, rows))
        if longest <= self._max_length:
            return rows
        if self._truncation == "error":
            raise TooLong.of(longest, self._max_length)
        if self._truncation == "right":
            return [fit(row, self._max_length, "right") for row in rows]
        num_cut = longest - self._max_length
        if num_cut >= num_prompt:
            raise TooLong(
                f"data.truncation={self._truncation} cuts the prompt, but without it the longest response has "
                f"{longest - num_prompt} tokens, and data.max_length is {self._max_length}",
                longest - num_prompt + 1,
            )
        kept = truncate(list(range(num_prompt)), num_prompt - num_cut, self._truncation)
        return [row.select([*kept, *range(num_prompt, len(row))]) for row in rows]

    def _usable(self, rows: np.ndarray) -> np.ndarray:
        if self.is_paired:
            return self._without_identical(rows)
        if "label" not in self._files.columns:
            raise DataError(
                f"expected chosen and rejected, or completion (or response) and label; the columns are {sorted(self._files.columns)}"
            )
        return rows

    def _without_identical(self, rows: np.ndarray) -> np.ndarray:
        # Only answers of the same size can be the same.
        candidates = rows[(row_sizes(self._files, ["chosen"]) == row_sizes(self._files, ["rejected"]))[rows]].tolist()
        found = ((i, self._files.rows([i])[0]) for i in candidates)
        identical = [i for i, row in found if row["chosen"] is not None and row["chosen"] == row.get("rejected")]
        if identical and not self._skip_identical:
            raise DataError(
                f"{self._files.place(identical[0])}: chosen and rejected are the same; so they are in {len(identical)} of "
                f"{len(rows)} rows: take these out, or set data.skip_identical=true",
                key="data.skip_identical",
            )
        self.num_skipped = len(identical)
        if self.num_skipped == len(rows):
            raise DataError(f"chosen and rejected are the same in all {len(rows)} rows")
        return np.setdiff1d(rows, identical, assume_unique=True)

    def _warn_of_other_questions(self) -> None:
        """Print how many pairs without a prompt answer different messages of the user, and the first of them."""
        used = set(self._rows.tolist())
        found = []
        columns = (self._files.batches(name, missing_ok=True) for name in ("chosen", "rejected"))
        for (start, chosen), (other_start, rejected) in zip(*columns, strict=False):
            if start != other_start:
                return  # a file lacks one of the columns, which is an error where its rows are read
            for row, (first, second) in enumerate(zip(_objects(chosen), _objects(rejected), strict=True), start):
                if row in used and answers_other_questions(first, second) and self._files.rows([row])[0].get("prompt") is None:
                    found.append(row)
        if found:
            many = f"{len(found):,} pairs answer" if len(found) > 1 else "1 pair answers"
            print(
                f"warning: {many} different messages of the user, which are not trained; what both begin with is the prompt. The first is "
                f"{self._files.place(found[0])}. Give the rows a column `prompt`, or take these out",
                flush=True,
            )

    def _answer(self, row: FileRow, answer: Any) -> MarkedText:
        """An answer after the row's prompt."""
        if not self.is_paired and not isinstance(row.get("label"), bool):
            raise DataError(f"label must be true or false, not {row.get('label')!r}")
        prompt = row.get("prompt")
        if prompt is None or answer is None:
            raise DataError(f"expected a prompt and an answer, got {prompt!r} and {answer!r}")
        conversation = self._conversation(prompt, answer)
        if conversation is None:
            return MarkedText(prompt + answer, ((len(prompt), len(prompt + answer)),), False)
        return self._chat(*conversation, row)

    def _chat(self, messages: list[Message], start: int, row: FileRow) -> MarkedText:
        return self._template.mark(messages, choose_messages(messages, "assistant", start), self._tools(row))


def _objects(values: Any) -> list[Any]:
    return values if isinstance(values, list) else values.to_pylist()


def answers_other_questions(chosen: Any, rejected: Any) -> bool:
    """Return whether the user says different things in two conversations, messages or texts of Anthropic's form."""
    if isinstance(chosen, str) and isinstance(rejected, str):
        rests = [text[len(shared_text(chosen, rejected)) :] for text in (chosen, rejected)]
        asked = [[turn.partition(_HH_TURN)[0] for turn in rest.split(_HH_USER)[1:]] for rest in rests]
    elif isinstance(chosen, list) and isinstance(rejected, list):
        asked = [[message for message in messages if not _is_of_assistant(message)] for messages in (chosen, rejected)]
    else:
        return False
    return asked[0] != asked[1]


def _is_of_assistant(message: Any) -> bool:
    return isinstance(message, dict) and message.get("role") == "assistant"


def _begins_with_assistant(messages: list[Any]) -> bool:
    return bool(messages) and isinstance(messages[0], dict) and messages[0].get("role") == "assistant"


def num_shared_messages(chosen: Sequence[Message], rejected: Sequence[Message]) -> int:
    """How many leading messages are the same, leaving one of each at least."""
    most = min(len(chosen), len(rejected)) - 1
    return next((i for i in range(most) if chosen[i] != rejected[i]), most)


def shared_text(chosen: str, rejected: str) -> str:
    """The prompt that two texts begin with: up to the last common `Assistant:` of Anthropic's form, else to the last common blank."""
    common = os.path.commonprefix([chosen, rejected])  # noqa: RUF071 - by characters is what is meant
    end = common.rfind(_HH_TURN)
    return common[: end + len(_HH_TURN)] if end >= 0 else common[: _LAST_WORD.search(common).start()]  # type: ignore[union-attr]


def num_shared(rows: Sequence[TokenRow]) -> int:
    """How many leading tokens are the prompt: those before the first trained one, as far as all rows have the same.

    They may differ before that where a word goes on after the prompt's end. Raises DataError where the rows have no token in common.
    """
    width = min(row.num_prompt for row in rows)
    same = np.all([row.ids[:width] == rows[0].ids[:width] for row in rows], axis=0)
    shared = width if same.all() else int(same.argmin())
    if not shared:
        raise DataError("chosen and rejected have no token of a prompt in common")
    return shared
