"""PromptEncoder: prompts to token ids, many at a time, and a bound on their number that needs no tokenising."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from lockstep.data.token_bound import tokens_beyond_bytes
from lockstep.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ChatPrompt = str | list[dict[str, Any]]
"""A text, or messages with role and content."""
Names = Callable[[int], str]
Shown = Callable[[list[dict[str, Any]]], str]


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
            raise DataError(f"{self._place(index)}: {error}") from error
