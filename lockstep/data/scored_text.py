"""What a reward model reads of a conversation: the same tokens when it is trained on pairs, and when it scores a response in RL."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lockstep.data.conversations import ChatTemplate, MarkedText
from lockstep.data.token_rows import SpanTokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class ScoredText:
    """The tokens of a prompt with its response: the tokenizer's chat template as it is, without one the two texts in a row. They end with
    a special token, and blanks that a template writes after it: the template's end of turn, else the tokenizer's end token.

    Raises DataError for a tokenizer without offsets, or without an end token.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenize = SpanTokenizer(tokenizer)
        self._template = ChatTemplate(tokenizer, {}) if tokenizer.chat_template else None

    def ids(self, prompt: str | Sequence[dict[str, Any]], response: str) -> list[int]:
        """The token ids. Raises DataError when the template refuses the messages."""
        if self._template is None:
            text = prompt if isinstance(prompt, str) else "\n".join(message["content"] for message in prompt)
            marked = MarkedText(text + response, (), False)
        else:
            before = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
            marked = MarkedText(self._template.render([*before, {"role": "assistant", "content": response}]), (), True)
        (row,) = self._tokenize([marked])
        return self._tokenize.ended(row).ids.tolist()
