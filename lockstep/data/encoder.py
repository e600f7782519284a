"""Prompts to token ids: PromptEncoder, a bound on the number of tokens that needs no tokenising, and what is invalid or too long."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from jinja2 import TemplateError

from lockstep.data.row_files import RowFiles, read_column
from lockstep.errors import ConfigError, DataError
from lockstep.observability.spans import progress

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ChatPrompt = str | list[dict[str, Any]]
"""A text, or messages with role and content."""
Names = Callable[[int], str]
Shown = Callable[[list[dict[str, Any]]], str]

_HARMLESS = {"NFC", "NFD", "Strip", "Split", "Digits", "Punctuation", "Whitespace", "WhitespaceSplit"}
"""Parts of a tokenizer that never add a character (Unicode normal forms of text that is not ASCII aside)."""
_UNICODE_GROWTH = 3
"""How many times longer, in UTF-8, a Unicode normal form (NFC, NFD) can be than text that is not plain ASCII."""
TRUNCATIONS = ("error", "left", "right", "middle")
Length = tuple[int, int]
"""A row's number and its prompt's number of tokens."""


class PromptEncoder:
    """Token ids of prompts: through the chat template where the tokenizer has one, as they are where it has none.

    A string becomes one user message where there is a template. `template_kwargs` are passed to it. `place` names a row in errors.
    `shown` renders the messages of a prompt in place of the template, as for episodes that begin with a description of tools.
    """

    tokens_beyond_bytes: float
    """A rendered text has at most `num_bytes(text)` and so many tokens; infinite where nothing is known of the tokenizer."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        template_kwargs: dict[str, Any],
        place: Names = "row {}".format,
        shown: Shown | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._place = place
        self._shown = shown
        self._has_template = bool(tokenizer.chat_template)
        self._template_kwargs = {"add_generation_prompt": True} | template_kwargs
        self.tokens_beyond_bytes = tokens_beyond_bytes(tokenizer)

    def encode(self, prompts: Sequence[ChatPrompt], indices: Sequence[int]) -> list[list[int]]:
        """The ids of each prompt. `indices` are their row numbers, for errors.

        Raises DataError when the template refuses a prompt, there is none for a message list, or a prompt has no tokens.
        """
        if not prompts:
            return []
        # One call for all: a fast tokenizer encodes them in threads of its own.
        encoded = self._tokenizer(
            self.render(prompts, indices),
            add_special_tokens=not self._has_template,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )
        result: list[list[int]] = encoded["input_ids"]
        for prompt, index, ids in zip(prompts, indices, result, strict=True):
            if not ids:
                raise DataError(f"{self._place(index)}: the prompt has no tokens: {prompt!r}")
        return result

    def render(self, prompts: Sequence[ChatPrompt], indices: Sequence[int]) -> list[str]:
        """The texts that are tokenised. Raises DataError as `encode` does."""
        if not self._has_template:
            for prompt, index in zip(prompts, indices, strict=True):
                if not isinstance(prompt, str):
                    raise DataError(
                        f"{self._place(index)}: the prompt is a message list, but the tokenizer has no chat template; "
                        "use a tokenizer that has one, or prompts that are plain strings"
                    )
            return list(prompts)  # type: ignore[arg-type]
        conversations = [[{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt for prompt in prompts]
        if self._shown is not None:
            return [self._show(messages, index) for messages, index in zip(conversations, indices, strict=True)]
        try:
            texts: Any = self._tokenizer.apply_chat_template(conversations, tokenize=False, **self._template_kwargs)
            return texts
        except (RecursionError, TemplateError, TypeError) as error:
            if len(prompts) > 1:  # find the one
                return [self.render([prompt], [index])[0] for prompt, index in zip(prompts, indices, strict=True)]
            raise DataError(f"{self._place(indices[0])}: the tokenizer's chat template refuses the prompt: {error}") from error

    def _show(self, messages: list[dict[str, Any]], index: int) -> str:
        assert self._shown is not None
        try:
            return self._shown(messages)
        except DataError as error:
            raise DataError(f"{self._place(index)}: {error}", key=error.key) from error


def num_bytes(text: str) -> int:
    """Bytes of the text in UTF-8 after Unicode normalisation, at most."""
    return len(text) if text.isascii() else len(text.encode()) * _UNICODE_GROWTH


def tokens_beyond_bytes(tokenizer: PreTrainedTokenizerBase) -> float:
    """How many tokens a text can have beyond one per byte (`num_bytes`); infinity where that is not known.

    A token of a fast tokenizer stands for at least one byte of what its model is given. What its model is given is longer than the
    text only where a part of the tokenizer makes it so. Parts that are known not to, or to add one character at the start of the
    text and after each added token (which is itself longer than one character), leave the bound at bytes + 1.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or any(len(token.content) < 2 for token in backend.get_added_tokens_decoder().values()):
        return math.inf
    for component in (backend.normalizer, backend.pre_tokenizer):
        if component is None:
            continue
        state = json.loads(component.__getstate__())
        steps = state.get("normalizers", state.get("pretokenizers")) if state["type"] == "Sequence" else [state]
        for position, step in enumerate(steps):
            kind = step["type"]
            at_start = position == 0
            if not (
                kind in _HARMLESS
                or (kind == "ByteLevel" and (at_start or not step.get("add_prefix_space")))
                or (kind == "Metaspace" and at_start)
                or (kind == "Prepend" and at_start and len(step["prepend"]) == 1)
                or (kind == "Replace" and len(step["pattern"].get("String", "")) >= len(step["content"]))
            ):
                return math.inf
    return 1 + tokenizer.num_special_tokens_to_add()


def truncate(ids: list[int], limit: int, side: str) -> list[int]:
    """Return at most `limit` of the ids: "left" cuts the start, "right" the end, "middle" keeps both ends (the end has the odd one)."""
    if side not in TRUNCATIONS[1:]:
        raise ConfigError(f"truncation side must be one of {TRUNCATIONS[1:]}, not {side!r}")
    num_cut = len(ids) - limit
    if num_cut <= 0:
        return ids
    head = {"left": 0, "right": limit, "middle": limit // 2}[side]
    return ids[:head] + ids[head + num_cut :]


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


def prompt_fault(prompt: Any) -> str | None:
    """Return why a prompt is invalid, or None: it must be a text or a list of messages."""
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
