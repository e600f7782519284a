"""RLHFDataset: files of prompts as tokenised rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jinja2 import TemplateError
from torch.utils.data import Dataset

from lockstep.errors import ConfigError, DataError
from lockstep.utils.dataset.row_files import RowFiles
from lockstep.utils.dataset.tag import Tag

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_TRUNCATIONS = ("error", "left", "right", "middle")


class RLHFDataset(Dataset):
    """The prompts of parquet, .json or .jsonl files; only the prompt column is required.

    An item is a dict of every column of the files (None where a file lacks one), plus, replacing columns of the same
    name:

    - `raw_prompt`: the prompt as it is in the file, a string or a list of {role, content};
    - `prompt_ids`: list[int], at most `max_prompt_length` tokens;
    - `index`: the row's number in the files as opened, whatever `max_samples` and the filter leave out.

    A message list goes through the tokenizer's chat template. A string becomes one user message where there is a
    template, and is tokenised as it is where there is none.

    Args:
        data_files: One path or several.
        tokenizer: A transformers tokenizer.
        config: The `data` section: `prompt_key`, `max_prompt_length`, `truncation`, `filter_overlong_prompts`,
            `apply_chat_template_kwargs`, `shuffle`, `seed`.
        max_samples: -1 for all rows; N > 0 for N of them, chosen by `seed` when `shuffle` is on, otherwise the first.
            Overlong prompts are filtered after that.

    Construction reads the prompt column once (tokenising it only when it filters) and raises DataError for a file
    that cannot be used, a missing prompt column, a prompt that is neither a string nor a message list or is empty,
    and for no rows at all. Reading an item raises DataError when its prompt is too long and `truncation` is "error",
    or the template refuses it.
    """

    num_filtered: int
    """Rows left out because their prompt is longer than `max_prompt_length`."""

    def __init__(
        self, data_files: str | Sequence[str], tokenizer: PreTrainedTokenizerBase, config: Any, max_samples: int = -1
    ) -> None:
        self._tokenizer = tokenizer
        self._prompt_key: str = config.prompt_key
        self._max_prompt_length: int = config.max_prompt_length
        self._truncation: str = config.truncation
        self._template_kwargs = dict(config.apply_chat_template_kwargs)
        if self._truncation not in _TRUNCATIONS:
            raise ConfigError(f"data.truncation must be one of {_TRUNCATIONS}, not {self._truncation!r}")
        if max_samples == 0 or max_samples < -1:
            raise ConfigError(
                f"max_samples (data.train_max_samples, data.val_max_samples) must be -1 or positive, not {max_samples}"
            )

        paths = [data_files] if isinstance(data_files, str | Path) else list(data_files)
        self._files = RowFiles(paths)
        if not len(self._files):
            raise DataError(f"no rows in {paths}")
        if self._prompt_key not in self._files.columns:
            raise DataError(
                f"no column {self._prompt_key!r} in {paths}: the columns are {sorted(self._files.columns)}; "
                "data.prompt_key names the one that holds the prompt"
            )
        chosen = _choose(len(self._files), max_samples, config.shuffle, config.seed)
        self._rows = self._usable(chosen, config.filter_overlong_prompts)
        self.num_filtered = len(chosen) - len(self._rows)
        if config.filter_overlong_prompts:
            print(f"data: left out {self.num_filtered} of {len(chosen)} prompts over {self._max_prompt_length} tokens")
        if not self._rows:
            raise DataError(
                f"all {len(chosen)} prompts are longer than data.max_prompt_length={self._max_prompt_length} tokens "
                "and data.filter_overlong_prompts leaves them out: raise the limit"
            )

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, item: int) -> dict[str, Any]:
        index = self._rows[item]
        row = self._files.row(index)
        prompt = row[self._prompt_key]
        ids = self._tokenize(prompt, index)
        if len(ids) > self._max_prompt_length:
            if self._truncation == "error":
                raise DataError(
                    f"row {index}: the prompt has {len(ids)} tokens, data.max_prompt_length is "
                    f"{self._max_prompt_length}; "
                    "set data.truncation to left, right or middle, or data.filter_overlong_prompts to true"
                )
            ids = truncate(ids, self._max_prompt_length, self._truncation)
        return row | {"raw_prompt": prompt, "prompt_ids": ids, "index": index}

    def tags(self) -> set[Tag]:
        """The different tags of the rows: what decides who judges them."""
        columns = [self._column(name) for name in ("data_source", "reward_model")]
        wanted = frozenset(self._rows)
        return {Tag.of(*values) for index, values in enumerate(zip(*columns, strict=True)) if index in wanted}

    def _column(self, name: str) -> Iterator[Any]:
        return self._files.scan(name) if name in self._files.columns else repeat(None, len(self._files))

    def _usable(self, chosen: Sequence[int], filter_overlong: bool) -> Sequence[int]:
        """Check the chosen rows' prompts (`chosen` ascends) and, when asked, keep only those that fit."""
        wanted = frozenset(chosen)
        kept = []
        for index, prompt in enumerate(self._files.scan(self._prompt_key)):
            if index not in wanted:
                continue
            _check_prompt(prompt, index)
            if not filter_overlong or len(self._tokenize(prompt, index)) <= self._max_prompt_length:
                kept.append(index)
        return kept

    def _tokenize(self, prompt: str | list[dict[str, Any]], index: int) -> list[int]:
        has_template = bool(self._tokenizer.chat_template)
        if isinstance(prompt, str) and not has_template:
            ids = self._tokenizer.encode(prompt)
        elif not has_template:
            raise DataError(
                f"row {index}: the prompt is a message list, but the tokenizer has no chat template; "
                "use a tokenizer that has one, or prompts that are plain strings"
            )
        else:
            messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            try:
                ids = self._tokenizer.apply_chat_template(
                    messages, add_generation_prompt=True, tokenize=True, return_dict=False, **self._template_kwargs
                )
            except TemplateError as error:
                raise DataError(f"row {index}: the tokenizer's chat template refuses the prompt: {error}") from error
        if not ids:
            raise DataError(f"row {index}: the prompt has no tokens: {prompt!r}")
        return ids


def truncate(ids: list[int], limit: int, side: str) -> list[int]:
    """At most `limit` of the ids: "left" cuts the start off, "right" the end, "middle" keeps both ends (the end has
    the odd one).
    """
    if side not in _TRUNCATIONS[1:]:
        raise ConfigError(f"truncation side must be one of {_TRUNCATIONS[1:]}, not {side!r}")
    num_cut = len(ids) - limit
    if num_cut <= 0:
        return ids
    head = {"left": 0, "right": limit, "middle": limit // 2}[side]
    return ids[:head] + ids[head + num_cut :]


def _choose(num_rows: int, max_samples: int, shuffle: bool, seed: int | None) -> Sequence[int]:
    """The row numbers to use, ascending: a random subset with `shuffle`, otherwise the first ones."""
    if max_samples == -1 or max_samples >= num_rows:
        return range(num_rows)
    if not shuffle:
        return range(max_samples)
    if seed is None:
        raise ConfigError("choosing a random subset needs a number in data.seed, or data.shuffle=false for the first rows")
    generator = torch.Generator().manual_seed(seed)
    return sorted(torch.randperm(num_rows, generator=generator)[:max_samples].tolist())


def _check_prompt(prompt: Any, index: int) -> None:
    if not isinstance(prompt, str | list):
        raise DataError(f"row {index}: the prompt must be a string or a list of messages, not {prompt!r}")
    if not prompt:
        raise DataError(f"row {index}: the prompt is empty")
    if isinstance(prompt, list) and not all(isinstance(m, dict) and "role" in m and "content" in m for m in prompt):
        raise DataError(f"row {index}: a message must be a dict with role and content; the prompt is {prompt!r}")
