"""RLHFDataset: files of prompts as tokenised rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import torch
from torch.utils.data import Dataset

from lockstep.data.encoder import PromptEncoder
from lockstep.data.prompt_shapes import PromptShapes, prompt_shapes
from lockstep.data.row_files import RowFiles, Values
from lockstep.data.tag import Tag
from lockstep.errors import ConfigError, DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_TRUNCATIONS = ("error", "left", "right", "middle")
_MEASURE_AT_ONCE = 2048
"""Prompts tokenised in one call while their lengths are measured."""
_CHECK_BYTES = 2 * 2**20
"""How much text is tokenised at most to find prompts that are too long before training starts: under a second of work."""

_Length = tuple[int, int]
"""A row's number and its prompt's number of tokens."""


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

    Construction reads the prompt column once and raises DataError for a file that cannot be used, a missing prompt
    column, a prompt that is empty or neither a string nor a message list, roles that the chat template refuses, and for
    no rows at all. With `truncation` "error" it also raises for prompts that are too long, with their number and the
    first of them. For that, and for the filter, only prompts are tokenised that could be too long by their number of
    bytes. The filter tokenises all of those; "error" the largest, 2 MB of them, so that a million rows open in seconds,
    and says when some are left that it measures only when they are read.
    """

    num_filtered: int
    """Rows left out because their prompt is longer than `max_prompt_length`."""

    def __init__(
        self, data_files: str | Sequence[str], tokenizer: PreTrainedTokenizerBase, config: Any, max_samples: int = -1
    ) -> None:
        self._encoder = PromptEncoder(tokenizer, dict(config.apply_chat_template_kwargs))
        self._prompt_key: str = config.prompt_key
        self._max_prompt_length: int = config.max_prompt_length
        self._truncation: str = config.truncation
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
        self._rows = _choose(len(self._files), max_samples, config.shuffle, config.seed)
        self.num_filtered = 0
        if config.filter_overlong_prompts:
            self._filter(self._check_prompts(measure_bytes=None))
        else:
            self._refuse(self._check_prompts(measure_bytes=_CHECK_BYTES if self._truncation == "error" else 0))

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
            self._refuse([(index, len(row_ids)) for index, row_ids in zip(indices, ids) if len(row_ids) > self._max_prompt_length])
        else:
            ids = [truncate(row_ids, self._max_prompt_length, self._truncation) for row_ids in ids]
        return [
            row | {"raw_prompt": prompt, "prompt_ids": row_ids, "index": index}
            for row, prompt, row_ids, index in zip(rows, prompts, ids, indices, strict=True)
        ]

    def tags(self) -> set[Tag]:
        """The different tags of the rows: what decides who judges them."""
        sources, reward_models = self._numbered("data_source"), self._numbered("reward_model")
        pairs = np.unique(np.stack([sources[0], reward_models[0]]), axis=1)
        return {Tag.of(sources[1][i], reward_models[1][j]) for i, j in pairs.T.tolist()}

    def _numbered(self, column: str) -> tuple[np.ndarray, list[Any]]:
        """For each row which of the different values it has, as far as a tag can tell them apart; and these values."""
        numbers, values_found = np.zeros(len(self._rows), np.int64), [None]
        if column not in self._files.columns:
            return numbers, values_found
        known: dict[str, int] = {}
        done = 0
        for rows, values in self._batches(column, self._rows):
            for value, here in _distinct(values):
                number = known.setdefault(repr(value), len(known) + 1)
                if number == len(values_found):
                    values_found.append(value)
                numbers[done + here] = number
            done += len(rows)
        return numbers, values_found

    def _batches(self, column: str, rows: np.ndarray) -> Iterator[tuple[np.ndarray, Values]]:
        """The values of a column in these rows (their numbers ascend), some at a time, with the row numbers."""
        for start, values in self._files.batches(column):
            low, high = np.searchsorted(rows, [start, start + len(values)])
            here = rows[low:high]
            if len(here):
                yield here, values if len(here) == len(values) else _pick(values, here - start)

    def _check_prompts(self, measure_bytes: int | None) -> list[_Length]:
        """Raise for prompts that cannot be used; return the rows whose prompt is too long.

        Only prompts that may be too long by their size are tokenised: the largest, `measure_bytes` of them together; None is all.
        """
        overlong: list[_Length] = []
        largest = _Largest(measure_bytes or 0)
        num_suspects = 0
        for rows, values in self._batches(self._prompt_key, self._rows):
            shapes = prompt_shapes(values)
            for position in np.flatnonzero(shapes.needs_look).tolist():
                _check_prompt(_value(values, position, rows), rows[position])
            suspects = np.flatnonzero(~self._fits(values, shapes, rows))
            num_suspects += len(suspects)
            if measure_bytes is None:
                overlong += self._measure(_objects(_pick(values, suspects)), rows[suspects].tolist())
            else:
                large = suspects[shapes.num_bytes[suspects] > largest.smallest]
                largest.add(shapes.num_bytes[large].tolist(), rows[large].tolist(), _objects(_pick(values, large)))
        if measure_bytes:
            overlong += self._measure(largest.prompts, largest.rows)
            if num_suspects > len(largest.rows) and not overlong:
                print(
                    f"data: {num_suspects} prompts may be longer than data.max_prompt_length={self._max_prompt_length} tokens; the largest "
                    f"{len(largest.rows)} are not, the others are measured when they are read (data.filter_overlong_prompts measures all)"
                )
        return sorted(overlong)

    def _measure(self, prompts: list[Any], rows: list[int]) -> list[_Length]:
        """The prompts that are too long, by tokenising them."""
        overlong = []
        for start in range(0, len(rows), _MEASURE_AT_ONCE):
            numbers = rows[start : start + _MEASURE_AT_ONCE]
            ids = self._encoder.encode(prompts[start : start + _MEASURE_AT_ONCE], numbers)
            overlong += [(n, len(row)) for n, row in zip(numbers, ids, strict=True) if len(row) > self._max_prompt_length]
        return overlong

    def _fits(self, values: Values, shapes: PromptShapes, rows: np.ndarray) -> np.ndarray:
        """True where the prompt has so few bytes that it cannot be too long. Raises for roles that the template refuses."""
        fits = np.zeros(len(rows), bool)
        for kind, roles in [(-1, None), *enumerate(shapes.role_lists)]:
            same = np.flatnonzero((shapes.roles == kind) & ~shapes.needs_look)
            if len(same):
                first = int(same[0])
                extra = self._encoder.max_tokens_beyond_bytes(roles, _value(values, first, rows), rows[first])
                fits[same] = extra is not None and shapes.num_bytes[same] + extra <= self._max_prompt_length
        return fits

    def _filter(self, overlong: list[_Length]) -> None:
        """Leave these rows out."""
        num_rows = len(self._rows)
        self._rows = np.setdiff1d(self._rows, [index for index, _ in overlong], assume_unique=True)
        self.num_filtered = len(overlong)
        print(f"data: left out {self.num_filtered} of {num_rows} prompts over {self._max_prompt_length} tokens")
        if not len(self._rows):
            raise DataError(
                f"all {num_rows} prompts are longer than data.max_prompt_length={self._max_prompt_length} tokens "
                "and data.filter_overlong_prompts leaves them out: raise the limit"
            )

    def _refuse(self, overlong: list[_Length]) -> None:
        """Raise when there are any."""
        if overlong:
            shown = ", ".join(f"row {index} ({length} tokens)" for index, length in overlong[:5])
            raise DataError(
                f"{len(overlong)} prompt{'s are' if len(overlong) > 1 else ' is'} longer than "
                f"data.max_prompt_length={self._max_prompt_length} tokens: {shown}{', ...' if len(overlong) > 5 else ''}; "
                "set data.truncation to left, right or middle, or data.filter_overlong_prompts to true"
            )


def _distinct(values: Values) -> Iterator[tuple[Any, np.ndarray]]:
    """The different values with their positions; of a reward_model only what a tag reads. Ground truths are as many as rows."""
    if (
        isinstance(values, pa.Array)
        and pa.types.is_struct(values.type)
        and not {"weights", "test_cases"} & set(_field_names(values))
    ):
        styles = values.field("style") if "style" in _field_names(values) else pa.nulls(len(values), pa.string())
        for style, positions in _distinct(styles):
            yield {"style": style}, positions
        return
    if isinstance(values, pa.Array) and not pa.types.is_nested(values.type):
        encoded = values if pa.types.is_dictionary(values.type) else values.dictionary_encode(null_encoding="encode")
        codes = encoded.indices.to_numpy(zero_copy_only=False)
        for code, value in enumerate(encoded.dictionary.to_pylist()):
            yield value, np.flatnonzero(codes == code)
        return
    for position, value in enumerate(_objects(values)):
        if isinstance(value, dict):
            value = {"style": value.get("style"), "weights": value.get("weights"), "test_cases": value.get("test_cases") and ()}
        yield value, np.array([position])


def _field_names(values: pa.StructArray) -> list[str]:
    return [field.name for field in values.type]


class _Largest:
    """Keeps the largest prompts that are added, about `max_bytes` of them together."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._kept: list[tuple[int, int, Any]] = []
        self.smallest = 0 if max_bytes else np.iinfo(np.int64).max
        """A prompt that is not larger will not be kept."""

    def add(self, sizes: list[int], rows: list[int], prompts: list[Any]) -> None:
        self._kept += zip(sizes, rows, prompts, strict=True)
        self._kept.sort(key=lambda kept: (-kept[0], kept[1]))
        total = 0
        for position, (size, _, _) in enumerate(self._kept):
            total += size
            if total >= self._max_bytes:
                del self._kept[position + 1 :]
                self.smallest = size
                break

    @property
    def rows(self) -> list[int]:
        return [row for _, row, _ in self._kept]

    @property
    def prompts(self) -> list[Any]:
        return [prompt for _, _, prompt in self._kept]


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


def _choose(num_rows: int, max_samples: int, shuffle: bool, seed: int | None) -> np.ndarray:
    """The row numbers to use, ascending: a random subset with `shuffle`, otherwise the first ones."""
    if max_samples == -1 or max_samples >= num_rows:
        return np.arange(num_rows)
    if not shuffle:
        return np.arange(max_samples)
    if seed is None:
        raise ConfigError("choosing a random subset needs a number in data.seed, or data.shuffle=false for the first rows")
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(num_rows, generator=generator)[:max_samples].sort().values.numpy()


def _pick(values: Values, positions: np.ndarray) -> Values:
    """The values at some positions."""
    return values.take(pa.array(positions)) if isinstance(values, pa.Array) else [values[position] for position in positions]


def _objects(values: Values) -> list[Any]:
    return values.to_pylist() if isinstance(values, pa.Array) else values


def _value(values: Values, position: int, rows: np.ndarray) -> Any:
    """One value as Python objects."""
    try:
        return values[position].as_py() if isinstance(values, pa.Array) else values[position]
    except UnicodeDecodeError as error:
        raise DataError(f"row {rows[position]}: the prompt is not valid UTF-8: {error}") from error


def _check_prompt(prompt: Any, index: int) -> None:
    if not isinstance(prompt, str | list):
        raise DataError(f"row {index}: the prompt must be a string or a list of messages, not {prompt!r}")
    if not prompt:
        raise DataError(f"row {index}: the prompt is empty")
    if isinstance(prompt, list) and not all(map(_is_message, prompt)):
        raise DataError(f"row {index}: a message must be a dict with role and content; the prompt is {prompt!r}")
    for text in [prompt] if isinstance(prompt, str) else [message["content"] for message in prompt]:
        # JSON can spell halves of a character, which no tokenizer takes.
        if isinstance(text, str) and any("\ud800" <= character <= "\udfff" for character in text):
            raise DataError(f"row {index}: the prompt is not valid Unicode: {text!r}")


def _is_message(message: Any) -> bool:
    """A role and a content; a message that calls tools may say nothing."""
    return (
        isinstance(message, dict)
        and isinstance(message.get("role"), str)
        and "content" in message
        and (message["content"] is not None or bool(message.get("tool_calls")))
    )
