"""SupervisedDataset: files of conversations, prompts with completions, or texts, as rows for supervised training."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.config.check import one_of
from lockstep.config.sft import TRAIN_ON
from lockstep.data.conversations import MarkedText, choose_messages, read_messages
from lockstep.data.token_rows import TokenRow, columns, fit, up_to_last_trained
from lockstep.data.training_rows import FileRow, TrainingRows
from lockstep.errors import DataError
from lockstep.protocol import DataProto

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class SupervisedDataset(TrainingRows):
    """Rows with `messages`; with `prompt` and `completion` (or `response`), strings or messages; or with `text`. `tools` (a list, or
    JSON text) may stand beside messages. A row that has several of these forms is the first of them.

    `train_on`: `last` (the last assistant message), `assistant` (all of them; of a completion only those in it), `all` (everything but
    the first token), `flag` (the messages whose `train` is true). A message with `train: false` or OpenAI's `weight: 0` is not
    trained. A `text`, and a completion that is plain text, is trained whole. A row that is trained to its end ends with a special token:
    the template's end of turn, else the tokenizer's end token. See TrainingRows for the other arguments.
    """

    columns_read = ("messages", "prompt", "completion", "response", "text", "tools")

    def __init__(
        self,
        files: str | Path | Sequence[str | Path],
        tokenizer: PreTrainedTokenizerBase,
        *,
        train_on: str = "assistant",
        **options: Any,
    ) -> None:
        one_of("data.train_on", train_on, TRAIN_ON)
        self._train_on = train_on
        super().__init__(files, tokenizer, **options)

    def batch(self, positions: Sequence[int]) -> DataProto:
        """The rows at these positions, with the columns

        - `prompts`: the tokens before the first trained one, at least one;
        - `responses`: from there to the last trained token;
        - `response_mask`: 1 where a token of the response is trained;
        - `num_bytes` (object): UTF-8 bytes of the trained text, special tokens aside;
        - `index` (object): the row's number in the files.

        Raises DataError for a row that cannot be used.
        """
        read = self.read(positions)
        rows = [row for part in read for row in part.tokens]
        objects = {"num_bytes": [row.num_bytes(self.special_ids) for row in rows], "index": [part.index for part in read]}
        cuts = [row.num_prompt for row in rows]
        return DataProto.from_dict(columns(rows, cuts), objects, {"pad_token_id": self._tokenizer.pad_token_id})

    def mark(self, row: FileRow) -> list[MarkedText]:
        answer = row.get("completion") if row.get("completion") is not None else row.get("response")
        if row.get("messages") is not None:
            messages = read_messages(row["messages"])
            start = 0
        elif row.get("prompt") is not None and answer is not None:
            conversation = self._conversation(row["prompt"], answer)
            if conversation is None:
                return [self._plain(row["prompt"], answer)]
            messages, start = conversation
        elif isinstance(row.get("text"), str):
            return [self._plain("", row["text"])]
        else:
            named = {name: row[name] for name in self.columns_read if row.get(name) is not None}
            raise DataError(
                "expected messages; prompt and completion (or response); or text; the columns are "
                f"{sorted(row)}, and of these there is {named or 'nothing'}"
            )
        tools = self._tools(row)
        chosen = choose_messages(messages, self._train_on, start)
        if self._train_on == "all":
            text = self._template.render_all(messages, tools)
            return [MarkedText(text, ((0, len(text)),), True)]
        return [self._template.mark(messages, chosen, tools)]

    def _plain(self, prompt: str, answer: str) -> MarkedText:
        if self._train_on == "flag":
            raise DataError("train_on=flag needs messages, each with a boolean `train`; the row is plain text", key="data.train_on")
        text = prompt + answer
        return MarkedText(text, ((0 if self._train_on == "all" else len(prompt), len(text)),), False)

    def finish(self, rows: list[TokenRow]) -> list[TokenRow]:
        rows = [self._tokenize.ended(row) if row.trained[-1:].any() else row for row in rows]
        return [fit(up_to_last_trained(row), self._max_length, self._truncation) for row in rows]
