"""RLHFDataset: files of prompts as tokenised rows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch.utils.data import Dataset

from lockstep.data.encoder import TRUNCATIONS, Length, PromptEncoder, Shown, find_overlong, truncate
from lockstep.data.row_files import RowFiles, choose_rows, read_column
from lockstep.data.tag import Tag
from lockstep.errors import ConfigError, DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_CHECK_BYTES = 2 * 2**20
"""How much text is tokenised at most to find prompts that are too long before training starts: under a second of work."""


class RLHFDataset(Dataset[dict[str, Any]]):
    """The prompts of parquet, .json or .jsonl files; only the prompt column is required.

    An item is a dict of every column of the files (None where a file lacks one), plus, replacing columns of the same
    name:

    - `raw_prompt`: the prompt as it is in the file, a string or a list of {role, content};
    - `prompt_ids`: list[int], at most `max_prompt_length` tokens;
    - `index`: the row's number in the files as opened, whatever `max_samples` and the filter leave out.

    `dataset[i]` is one item; `dataset.__getitems__(positions)` is several, tokenised together, which is faster.

    A message list goes through the tokenizer's chat template. A string becomes one user message where there is a
    template, and is tokenised as it is where there is none.

    Args:
        data_files: One path or several.
        tokenizer: A transformers tokenizer.
        config: The `data` section: `prompt_key`, `max_prompt_length`, `truncation`, `filter_overlong_prompts`,
            `apply_chat_template_kwargs`, `shuffle`, `seed`.
        max_samples: -1 for all rows; N > 0 for N of them, chosen by `seed` when `shuffle` is on, otherwise the first.
            Overlong prompts are filtered after that.
        shown: Renders the messages of a prompt in place of the chat template: for episodes, which begin with a description of tools.

    Construction reads the prompt column once and raises DataError for a file that cannot be used, a missing prompt
    column, a prompt that is empty, neither a string nor a message list, or refused by the chat template, and for no rows
    at all. With `truncation` "error" it also raises for prompts that are too long, with their number and the
    first of them. For that, and for the filter, only prompts are tokenised that could be too long by their number of
    bytes. The filter tokenises all of those; "error" the largest, 2 MB of them, and says when some are left that it
    measures only when they are read.
    """

    num_filtered: int
    """Rows left out because their prompt is longer than `max_prompt_length`."""

    def __init__(
        self,
        data_files: str | Sequence[str],
        tokenizer: PreTrainedTokenizerBase,
        config: Any,
        max_samples: int = -1,
        shown: Shown | None = None,
    ) -> None:
        self._prompt_key: str = config.prompt_key
        self._max_prompt_length: int = config.max_prompt_length
        self._truncation: str = config.truncation
        if self._truncation not in TRUNCATIONS:
            raise ConfigError(f"data.truncation must be one of {TRUNCATIONS}, not {self._truncation!r}", key="data.truncation")
        if max_samples == 0 or max_samples < -1:
            raise ConfigError(
                f"max_samples (data.train_max_samples, data.val_max_samples) must be -1 or positive, not {max_samples}"
            )

        paths = [data_files] if isinstance(data_files, str | Path) else list(data_files)
        self._files = RowFiles(paths)
        self.columns = self._files.columns
        self._encoder = PromptEncoder(tokenizer, dict(config.apply_chat_template_kwargs), self._files.place, shown)
        if not len(self._files):
            raise DataError(f"no rows in {paths}")
        if self._prompt_key not in self._files.columns:
            raise DataError(
                f"no column {self._prompt_key!r} in {paths}: the columns are {sorted(self._files.columns)}; "
                "data.prompt_key names the one that holds the prompt",
                key="data.prompt_key",
            )
        self._rows = choose_rows(len(self._files), max_samples, config.shuffle, config.seed)
        self.num_filtered = 0
        measured = math.inf if config.filter_overlong_prompts else _CHECK_BYTES if self._truncation == "error" else 0
        found = find_overlong(self._files, self._prompt_key, self._rows, self._encoder, self._max_prompt_length, measured)
        self._filter(found[0]) if config.filter_overlong_prompts else self._refuse(*found)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, item: int) -> dict[str, Any]:
        return self._read([item])[0]

    def __getitems__(self, items: Sequence[int]) -> list[dict[str, Any]]:
        """The items at these positions, in that order. Raises DataError like the constructor, for a prompt that it did not look at."""
        if type(self).__getitem__ is not RLHFDataset.__getitem__:  # a subclass says what an item is
            return [self[item] for item in items]
        return self._read(items)

    def _read(self, items: Sequence[int]) -> list[dict[str, Any]]:
        indices = [int(self._rows[item]) for item in items]
        rows = self._files.rows(indices)
        prompts = [row[self._prompt_key] for row in rows]
        ids = self._encoder.encode(prompts, indices)
        if self._truncation == "error":
            self._refuse([(i, len(row)) for i, row in zip(indices, ids, strict=True) if len(row) > self._max_prompt_length], False)
        else:
            ids = [truncate(row_ids, self._max_prompt_length, self._truncation) for row_ids in ids]
        return [
            row | {"raw_prompt": prompt, "prompt_ids": row_ids, "index": index}
            for row, prompt, row_ids, index in zip(rows, prompts, ids, indices, strict=True)
        ]

    def tags(self) -> set[Tag]:
        """The different tags of the rows: what decides who judges them."""
        return set(map(Tag.of, self.column("data_source"), self.column("reward_model")))

    def column(self, name: str) -> Iterable[Any]:
        """The values of a column in the dataset's rows; None for all where no file has it."""
        if name not in self._files.columns:
            return [None] * len(self._rows)
        return (value for _, values in read_column(self._files, name, self._rows) for value in values)

    def _filter(self, overlong: list[Length]) -> None:
        """Leave these rows out."""
        num_rows = len(self._rows)
        self._rows = np.setdiff1d(self._rows, [index for index, _ in overlong], assume_unique=True)
        self.num_filtered = len(overlong)
        print(f"data: left out {self.num_filtered} of {num_rows} prompts over {self._max_prompt_length} tokens")
        if not len(self._rows):
            raise DataError(
                f"all {num_rows} prompts are longer than data.max_prompt_length={self._max_prompt_length} tokens "
                "and data.filter_overlong_prompts leaves them out: raise the limit",
                key="data.max_prompt_length",
            )

    def _refuse(self, overlong: list[Length], are_all: bool) -> None:
        """Raise when there are any; without `are_all` there may be more."""
        if overlong:
            shown = ", ".join(f"{self._files.place(index)} ({length} tokens)" for index, length in overlong[:3])
            raise DataError(
                f"{'' if are_all else 'at least '}{len(overlong)} prompt{'s are' if len(overlong) > 1 else ' is'} longer than "
                f"data.max_prompt_length={self._max_prompt_length} tokens: {shown}{', ...' if len(overlong) > 3 else ''}; "
                "set data.truncation to left, right or middle, or data.filter_overlong_prompts to true",
                key="data.max_prompt_length",
            )
