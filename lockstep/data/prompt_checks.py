"""What is read of every row before training: a column of the chosen rows, and which prompts cannot be used or are too long."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from lockstep.data.encoder import PromptEncoder
from lockstep.data.row_files import RowFiles, Values
from lockstep.data.token_bound import num_bytes
from lockstep.errors import ConfigError, DataError
from lockstep.observability.spans import progress

Length = tuple[int, int]
"""A row's number and its prompt's number of tokens."""


def choose_rows(num_rows: int, max_samples: int, shuffle: bool, seed: int | None) -> np.ndarray:
    """The row numbers to use, ascending: a random subset with `shuffle`, otherwise the first ones."""
    if max_samples == -1 or max_samples >= num_rows:
        return np.arange(num_rows)
    if not shuffle:
        return np.arange(max_samples)
    if seed is None:
        raise ConfigError("choosing a random subset needs a number in data.seed, or data.shuffle=false for the first rows")
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(num_rows, generator=generator)[:max_samples].sort().values.numpy()


def read_column(files: RowFiles, column: str, rows: np.ndarray) -> Iterator[tuple[list[int], list[Any]]]:
    """Row numbers and values of a column in `rows` (their numbers ascend), some at a time."""
    for start, values in files.batches(column):
        low, high = np.searchsorted(rows, [start, start + len(values)])
        here = rows[low:high].tolist()
        if not here:
            continue
        if len(here) < len(values):
            positions = [row - start for row in here]
            values = values.take(pa.array(positions)) if isinstance(values, pa.Array) else [values[i] for i in positions]
        yield here, _objects(values, here, files)


def find_overlong(
    files: RowFiles, column: str, rows: np.ndarray, encoder: PromptEncoder, limit: int, measure_bytes: float
) -> tuple[list[Length], bool]:
    """The rows whose prompt has more than `limit` tokens, and whether these are all. Raises DataError for prompts that cannot be used.

    Every prompt goes through the template. Only those that may be too long by their size are tokenised: the largest,
    `measure_bytes` of them together.
    """
    found: list[int] = []
    with progress("checking prompts", len(rows), "prompts") as seen:
        for numbers, prompts in read_column(files, column, rows):
            for prompt, number in zip(prompts, numbers, strict=True):
                if fault := prompt_fault(prompt):
                    raise DataError(f"{files.place(number)}: {fault}")
            found += map(num_bytes, encoder.render(prompts, numbers))
            seen.done = len(found)
    sizes = np.array(found)
    suspects = np.flatnonzero(sizes + encoder.tokens_beyond_bytes > limit)
    suspects = suspects[np.argsort(-sizes[suspects], kind="stable")]
    num_measured = int(np.searchsorted(np.cumsum(sizes[suspects]), measure_bytes)) + 1 if measure_bytes else 0
    overlong: list[Length] = []
    with progress("tokenising the longest prompts", num_measured, "prompts") as seen:
        for numbers, prompts in read_column(files, column, np.sort(rows[suspects[:num_measured]])):
            lengths = [len(ids) for ids in encoder.encode(prompts, numbers)]
            overlong += [(number, length) for number, length in zip(numbers, lengths, strict=True) if length > limit]
            seen.done = seen.done + len(lengths)
            seen.tokens = seen.tokens + sum(lengths)
    if 0 < num_measured < len(suspects) and not overlong:
        print(
            f"data: {len(suspects)} prompts may be longer than data.max_prompt_length={limit} tokens; the largest "
            f"{num_measured} are not, the others are measured when they are read (data.filter_overlong_prompts measures all)"
        )
    return overlong, num_measured >= len(suspects)


def _objects(values: Values, rows: list[int], files: RowFiles) -> list[Any]:
    """The values of these rows as Python objects. Raises DataError for text that is not UTF-8."""
    if not isinstance(values, pa.Array):
        return values
    try:
        return values.to_pylist()
    except UnicodeDecodeError as error:
        if len(rows) > 1:  # find the one
            return [_objects(values[position : position + 1], [row], files)[0] for position, row in enumerate(rows)]
        raise DataError(f"{files.place(rows[0])}: the prompt is not valid UTF-8: {error}") from error


def prompt_fault(prompt: Any) -> str | None:
    """Why a prompt cannot be used: it is to be a text or a list of messages. None where it can."""
    if not isinstance(prompt, str | list):
        return f"the prompt must be a string or a list of messages, not {prompt!r}"
    if not prompt:
        return "the prompt is empty"
    if isinstance(prompt, list) and not all(map(_is_message, prompt)):
        return f"a message must be a dict with role and content; the prompt is {prompt!r}"
    for text in [prompt] if isinstance(prompt, str) else [message["content"] for message in prompt]:
        try:
            if isinstance(text, str):
                text.encode()
        except UnicodeEncodeError:  # JSON can spell halves of a character, which no tokenizer takes
            return f"the prompt is not valid Unicode: {text!r}"
    return None


def _is_message(message: Any) -> bool:
    """A role and a content; a message that calls tools may say nothing."""
    return (
        isinstance(message, dict)
        and isinstance(message.get("role"), str)
        and "content" in message
        and (message["content"] is not None or bool(message.get("tool_calls")))
    )
