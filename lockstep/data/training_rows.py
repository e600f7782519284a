"""TrainingRows: what datasets of rows to train on share. A row is read, marked and tokenised when it is asked for."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from lockstep.config.check import one_of
from lockstep.config.data import DataConfig
from lockstep.data.conversations import ChatTemplate, MarkedText, Message, read_json, read_messages
from lockstep.data.encoder import tokens_beyond_bytes
from lockstep.data.rl_dataset import TRUNCATIONS
from lockstep.data.row_files import RowFiles, choose_rows, row_sizes
from lockstep.data.token_rows import SpanTokenizer, TokenRow, TooLong
from lockstep.errors import DataError
from lockstep.observability.spans import progress

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FileRow = dict[str, Any]
Result = TypeVar("Result")

_CHECK_BYTES = 2 * 2**20
"""Text of the longest rows that is tokenised to find rows that are too long: about a second of work."""
_CHUNK = 256
"""Rows that are tokenised at once for it."""
_FRAME_TOKENS = 64
"""Tokens that a template may write beside the texts of a row."""
_NUM_CHECKED = 32
"""How many of the longest rows, and of rows spread over the files, are tried before training."""


@dataclass(frozen=True)
class ReadRow:
    """A row of the files, its number in them, and the tokens of each text that it became."""

    index: int
    row: FileRow
    tokens: list[TokenRow]


class TrainingRows:
    """Rows of parquet, .json or .jsonl files as tokens. A subclass says what a row of the files becomes: `mark` and `finish`.

    Args:
        files: One path or several.
        tokenizer: A fast transformers tokenizer.
        max_length: The most tokens of a row, prompt and response together.
        truncation: What happens to a longer row: error, left (keep the end), right (keep the start), middle (keep both ends).
        max_samples: Use so many rows, chosen by `seed`, or the first ones where that is None; None or -1 for all.
        template_kwargs: Passed to the tokenizer's chat template (`data.apply_chat_template_kwargs`).
        use_template: False tokenises a prompt that is a string as it is. True makes it a user message where the tokenizer has a chat
            template, as in RL.
        filter_overlong: Leave out the rows that do not fit into `max_length`; `num_filtered` counts them. Rows that could be too long by
            their size are measured for it.
        try_rows: False opens the files without trying rows, for a look at what is wrong with them.

    The constructor tries the first row, the longest ones and some between, so that a wrong column or a row that is too long is an
    error before training. Rows that are too long are one error, with their number and the longest of them. Every DataError about a row
    names its file and its number there, from 0.
    """

    columns_read: tuple[str, ...]
    """Columns of the files that decide what a row becomes."""

    def __init__(
        self,
        files: str | Path | Sequence[str | Path],
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_length: int,
        truncation: str = DataConfig.truncation,
        max_samples: int | None = None,
        seed: int | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        use_template: bool = True,
        filter_overlong: bool = False,
        try_rows: bool = True,
    ) -> None:
        one_of("data.truncation", truncation, TRUNCATIONS)
        self._tokenizer = tokenizer
        self._max_length = max_length
        self._truncation = truncation
        self._tokenize = SpanTokenizer(tokenizer)
        self._template = ChatTemplate(tokenizer, template_kwargs or {})
        self._use_template = use_template and bool(tokenizer.chat_template)
        paths = [files] if isinstance(files, str | Path) else list(files)
        self._files = RowFiles(paths)
        if not len(self._files):
            raise DataError(f"no rows in {[str(path) for path in paths]}")
        self._rows = self._usable(choose_rows(len(self._files), -1 if max_samples is None else max_samples, seed is not None, seed))
        self.num_filtered = 0
        if try_rows:
            self._try_rows(filter_overlong)

    def __len__(self) -> int:
        return len(self._rows)

    def _try_rows(self, filter_overlong: bool) -> None:
        """Leave out rows that are too long, or raise DataError for them; raise it also for other rows that are tried and cannot be used."""
        sizes = row_sizes(self._files, self.columns_read)[self._rows]
        suspects = np.flatnonzero(self._most_tokens(sizes) > self._max_length)
        suspects = suspects[np.argsort(-sizes[suspects], kind="stable")]
        if not filter_overlong:
            suspects = suspects[: int(np.searchsorted(np.cumsum(sizes[suspects]), _CHECK_BYTES)) + 1]
        overlong = self._overlong(suspects.tolist())
        if overlong and filter_overlong:
            self.num_filtered, num_rows = len(overlong), len(self)
            print(
                f"data: left out {self.num_filtered:,} of {num_rows:,} rows that do not fit into data.max_length={self._max_length}"
            )
            if self.num_filtered == num_rows:
                raise DataError(
                    f"data.filter_overlong_rows leaves out all {num_rows:,} rows: with data.max_length={max(overlong.values())} all fit",
                    key="data.filter_overlong_rows",
                )
            self._rows, sizes = (np.delete(values, list(overlong)) for values in (self._rows, sizes))
        elif overlong:
            raise self._too_many(overlong)
        with progress(f"trying some of {len(self):,} rows"):
            longest = np.argsort(-sizes, kind="stable")[:_NUM_CHECKED].tolist()
            self.read(list(dict.fromkeys([0, *longest, *self.spread(_NUM_CHECKED)])))

    def _most_tokens(self, sizes: np.ndarray) -> np.ndarray:
        """The most tokens that rows with so much text may have, as far as that is known without tokenising them."""
        frame = tokens_beyond_bytes(self._tokenizer)
        if math.isfinite(frame) and self._tokenizer.chat_template:
            with contextlib.suppress(DataError):
                frame += len(self._template.render([{"role": "user", "content": "x"}], add_generation_prompt=True))
        # A template writes more around many messages; their roles are among the sizes.
        return 1.25 * sizes + frame + _FRAME_TOKENS

    def _overlong(self, positions: Sequence[int]) -> dict[int, int]:
        """Those of the positions whose rows do not fit into `max_length`, with a length with which each does."""
        found: dict[int, int] = {}
        with progress("measuring the longest rows", len(positions), "rows") as seen:
            for start in range(0, len(positions), _CHUNK):
                chunk = positions[start : start + _CHUNK]
                indices, _, apart = self._tokens(chunk)
                for position, index, rows in zip(chunk, indices, apart, strict=True):
                    try:
                        self._named(index, self.finish, rows)
                    except TooLong as error:
                        found[position] = error.needed
                seen.done = start + len(chunk)
        return found

    def _too_many(self, overlong: Mapping[int, int]) -> DataError:
        """The error about all rows that are known to be too long."""
        position = max(overlong, key=lambda position: overlong[position])
        cut = f", cut by data.truncation={self._truncation}," if self._truncation != "error" else ""
        many = f"{len(overlong):,} rows do" if len(overlong) > 1 else "1 row does"
        return DataError(
            f"{many} not fit{cut} into data.max_length={self._max_length}; the longest is {self.place(position)}, which needs "
            f"{overlong[position]} tokens: set data.max_length={overlong[position]}"
            + ("" if cut else ", set data.truncation to left, right or middle,")
            + " or leave such rows out with data.filter_overlong_rows=true",
            key="data.max_length",
        )

    def sources(self) -> dict[str, list[int]]:
        """The positions of the rows of each `data_source`; of rows without one, under "unknown"."""
        named = ["unknown"] * len(self._files)
        for start, values in self._files.batches("data_source", missing_ok=True):
            named[start : start + len(values)] = [
                str(value) for value in (values if isinstance(values, list) else values.to_pylist())
            ]
        found: dict[str, list[int]] = {}
        for position, row in enumerate(self._rows):
            found.setdefault(named[row], []).append(position)
        return found

    def spread(self, count: int) -> list[int]:
        """So many positions, at most, at even distances over all rows."""
        return sorted(set(np.linspace(0, len(self) - 1, count).astype(int).tolist()))

    def place(self, position: int) -> str:
        """The file of the row at a position, and its number there."""
        return self._files.place(int(self._rows[position]))

    @property
    def special_ids(self) -> np.ndarray:
        """The ids of special tokens."""
        return self._tokenize.special_ids

    def read(self, positions: Sequence[int]) -> list[ReadRow]:
        """The rows at these positions and the tokens of what each became. Raises DataError for a row that cannot be used."""
        indices, rows, apart = self._tokens(positions)
        # The longest first: where several are too long, the error says how long a row must be allowed to be.
        order = sorted(range(len(apart)), key=lambda i: -max(map(len, apart[i])))
        finished = {i: self._named(indices[i], self.finish, apart[i]) for i in order}
        return [ReadRow(index, row, finished[i]) for i, (index, row) in enumerate(zip(indices, rows, strict=True))]

    def _tokens(self, positions: Sequence[int]) -> tuple[list[int], list[FileRow], list[list[TokenRow]]]:
        """The numbers of the rows at these positions, the rows, and the tokens of each text that they became."""
        indices = [int(self._rows[position]) for position in positions]
        rows = [self._named(index, self._row, index) for index in indices]
        marked = [self._named(index, self.mark, row) for index, row in zip(indices, rows, strict=True)]
        tokens = iter(self._tokenize([text for texts in marked for text in texts]))
        return indices, rows, [[next(tokens) for _ in texts] for texts in marked]

    def _usable(self, rows: np.ndarray) -> np.ndarray:
        """Those of the row numbers that are used."""
        return rows

    def mark(self, row: FileRow) -> list[MarkedText]:
        """The texts that a row of the files becomes. Raises DataError for a row that cannot be used."""
        raise NotImplementedError

    def finish(self, rows: list[TokenRow]) -> list[TokenRow]:
        """The tokens of these texts within `max_length`. Raises DataError where that cannot be."""
        raise NotImplementedError

    def _row(self, index: int) -> FileRow:
        row = self._files.rows([index])[0]
        if self._files.path(index).suffix == ".parquet" and _is_filled_up(row, False):
            raise DataError(
                "a tool or the arguments of a call have fields that are null: Arrow gives each of them the fields of all. "
                "Write `tools` and `arguments` as JSON text"
            )
        return row

    def _named(self, index: int, function: Callable[..., Result], *arguments: Any) -> Result:
        try:
            return function(*arguments)
        except TooLong as error:
            raise TooLong(f"{self._files.place(index)}: {error}", error.needed) from error
        except DataError as error:
            raise DataError(f"{self._files.place(index)}: {error}", key=error.key) from error

    def _conversation(self, prompt: Any, answer: Any) -> tuple[list[Message], int] | None:
        """The messages of a prompt and its answer, each a string or messages, and how many are the prompt's; None for plain text."""
        if isinstance(prompt, str) and isinstance(answer, str) and not self._use_template:
            return None
        before = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else read_messages(prompt)
        after = [{"role": "assistant", "content": answer}] if isinstance(answer, str) else read_messages(answer)
        return [*before, *after], len(before)

    @staticmethod
    def _tools(row: FileRow) -> Any:
        tools = read_json("tools", row.get("tools"))
        if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
            raise DataError(f"tools must be a list of objects, or that as JSON text, not {row['tools']!r}")
        return tools or None


def _is_filled_up(value: Any, is_tool: bool) -> bool:
    """Whether something in `tools` or `arguments` is None."""
    if isinstance(value, dict):
        return any(
            _is_filled_up(part, is_tool or (name in ("tools", "arguments") and part is not None)) for name, part in value.items()
        )
    return any(_is_filled_up(part, is_tool) for part in value) if isinstance(value, list) else is_tool and value is None
