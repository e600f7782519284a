"""PromptEncoder: prompts to token ids, many at a time, and a bound on their number that needs no tokenising."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from lockstep.data.prompt_shapes import UNICODE_GROWTH
from lockstep.data.word_memory import WordMemory
from lockstep.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Prompt = str | list[dict[str, Any]]

_HARMLESS = {"NFC", "NFD", "Strip", "Split", "Digits", "Punctuation", "Whitespace", "WhitespaceSplit"}
"""Parts of a tokenizer that never add a character (Unicode normal forms of text that is not ASCII aside)."""


class PromptEncoder:
    """Token ids of prompts: through the chat template where the tokenizer has one, as they are where it has none.

    A string becomes one user message where there is a template. `template_kwargs` are passed to it.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template_kwargs: dict[str, Any]) -> None:
        self._tokenizer = tokenizer
        self._has_template = bool(tokenizer.chat_template)
        self._template_kwargs = {"add_generation_prompt": True} | template_kwargs
        # The memory adds no special tokens. With a template none are added; without, only some tokenizers add none.
        adds_none = self._has_template or not tokenizer.num_special_tokens_to_add()
        self._memory = WordMemory.of(tokenizer) if adds_none else None
        self._extra = _tokens_beyond_bytes(tokenizer)
        self._num_added_bytes: dict[tuple[str, ...], int | None] = {}

    def encode(self, prompts: Sequence[Prompt], indices: Sequence[int]) -> list[list[int]]:
        """The ids of each prompt. `indices` are their row numbers, for errors.

        Raises DataError when the template refuses a prompt, there is none for a message list, or a prompt has no tokens.
        """
        if not prompts:
            return []
        texts = self._render(prompts, indices)
        known = [self._memory.encode(text) if self._memory else None for text in texts]
        asked = [text for text, ids in zip(texts, known, strict=True) if ids is None]
        # One call for all: a fast tokenizer encodes them in threads of its own.
        answers = iter(
            self._tokenizer(asked, add_special_tokens=not self._has_template, verbose=False)["input_ids"] if asked else []
        )
        result = [next(answers) if ids is None else ids for ids in known]
        for prompt, index, ids in zip(prompts, indices, result, strict=True):
            if not ids:
                raise DataError(f"row {index}: the prompt has no tokens: {prompt!r}")
        return result

    def max_tokens_beyond_bytes(self, roles: tuple[str, ...] | None, example: Prompt, index: int) -> int | None:
        """How many tokens a prompt with these roles (None: a string) can have at most beyond one a byte of its text.

        None when nothing can be said. The template must copy a content at most once, and add the same whatever it says. `example` is
        row `index`, one prompt of this kind: it goes through the template, so that one that is refused is found at once.
        """
        key = roles or ()
        if key not in self._num_added_bytes:
            self._render([example], [index])
            self._num_added_bytes[key] = self._measure_template(roles or ("user",))
        added = self._num_added_bytes[key]
        return None if added is None or self._extra is None else added + self._extra

    def _measure_template(self, roles: tuple[str, ...]) -> int | None:
        """Bytes of what the template makes of short messages with these roles; None when it refuses or repeats them."""
        if not self._has_template:
            return 0
        contents = [f"q{position}z" for position in range(len(roles))]
        try:
            rendered = self._apply([[{"role": r, "content": c} for r, c in zip(roles, contents, strict=True)]])[0]
        except (TemplateError, TypeError):
            return None
        if any(rendered.count(content) > 1 for content in contents):
            return None
        return len(rendered.encode()) * (1 if rendered.isascii() else UNICODE_GROWTH)

    def _apply(self, conversations: list[list[dict[str, Any]]]) -> list[str]:
        rendered: Any = self._tokenizer.apply_chat_template(conversations, tokenize=False, **self._template_kwargs)
        return rendered

    def _render(self, prompts: Sequence[Prompt], indices: Sequence[int]) -> list[str]:
        """The text that is tokenised."""
        if not self._has_template:
            for prompt, index in zip(prompts, indices, strict=True):
                if not isinstance(prompt, str):
                    raise DataError(
                        f"row {index}: the prompt is a message list, but the tokenizer has no chat template; "
                        "use a tokenizer that has one, or prompts that are plain strings"
                    )
            return list(prompts)  # type: ignore[arg-type]
        conversations = [[{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt for prompt in prompts]
        try:
            return self._apply(conversations)
        except (TemplateError, TypeError) as error:
            if len(prompts) > 1:  # find the one
                return [self._render([prompt], [index])[0] for prompt, index in zip(prompts, indices, strict=True)]
            raise DataError(f"row {indices[0]}: the tokenizer's chat template refuses the prompt: {error}") from error


def _tokens_beyond_bytes(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """How many tokens a text can have beyond one a byte (three a byte that is not ASCII); None when that is not known.

    A token of a fast tokenizer stands for at least one byte of what its model is given. What its model is given is longer than the
    text only where a part of the tokenizer makes it so. Parts that are known not to, or to add one character at the start of the
    text and after each added token (which is itself longer than one character), leave the bound at bytes + 1.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or any(len(token.content) < 2 for token in backend.get_added_tokens_decoder().values()):
        return None
    for component in (backend.normalizer, backend.pre_tokenizer):
        if component is None:
            continue
        state = json.loads(component.__getstate__())
        steps = state.get("normalizers", state.get("pretokenizers")) if state["type"] == "Sequence" else [state]
        for position, step in enumerate(steps):
            kind, at_start = step["type"], position == 0
            if not (
                kind in _HARMLESS
                or (kind == "ByteLevel" and (at_start or not step.get("add_prefix_space")))
                or (kind == "Metaspace" and at_start)
                or (kind == "Prepend" and at_start and len(step["prepend"]) == 1)
                or (kind == "Replace" and len(step["pattern"].get("String", "")) >= len(step["content"]))
            ):
                return None
    return 1 + tokenizer.num_special_tokens_to_add()
