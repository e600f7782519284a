"""Between text and token ids: prompts, tokens by themselves, and a response as it grows."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lockstep.data.conversations import ChatTemplate, read_messages
from lockstep.errors import DataError
from lockstep.tools.serve.schema import BadRequest, shortened

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_UNFINISHED = "\ufffd"
"""What a decoder writes for bytes that are no character yet."""
_LOOK_BACK = 4
"""Tokens before a new one that its text can depend on: a character has at most four bytes, and a token one or more of them."""


class PromptReader:
    """Tokenises for a model of this vocabulary and context. For one thread at a time."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocabulary: int, context: int | None) -> None:
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self.context = context
        longest_token = max(map(len, tokenizer.get_vocab()))
        self.max_characters = None if context is None else context * longest_token
        """A longer text has more tokens than the context holds."""
        self._template = ChatTemplate(tokenizer, {})

    def read(self, name: str, prompt: str | list[int], add_special_tokens: bool) -> list[int]:
        """The ids of a prompt, which errors call `name`. Raises BadRequest for one that the model cannot continue."""
        if isinstance(prompt, str):
            if self.max_characters is not None and len(prompt) > self.max_characters:
                raise BadRequest(
                    f"{name} has {len(prompt)} characters; the model's context holds {self.context} tokens, of at most "
                    f"{self.max_characters} characters",
                    "prompt",
                    code="context_length_exceeded",
                )
            prompt = self.encode(prompt, add_special_tokens)
        self._check(name, prompt)
        return prompt

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """The ids of a text."""
        return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens, verbose=False))

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids."""
        return str(self._tokenizer.decode(list(ids)))

    def render(self, messages: list[dict[str, Any]], tools: list[Any] | None, template_kwargs: Mapping[str, Any]) -> str:
        """A conversation as the model's own template writes it, in training too. Raises BadRequest where it has none, or refuses it."""
        if not self._tokenizer.chat_template:
            raise BadRequest("the model has no chat template; use /v1/completions", "messages", code="no_chat_template")
        try:
            return self._template.render_all(read_messages(messages), tools, more=template_kwargs)
        except DataError as error:
            raise BadRequest(str(error), "messages") from error

    def _check(self, name: str, ids: Sequence[int]) -> None:
        if not ids:
            raise BadRequest(f"{name} has no tokens; it needs one or more", "prompt")
        if self.context is not None and len(ids) >= self.context:
            raise BadRequest(
                f"{name} has {len(ids)} tokens; the model's context holds {self.context}, one of them for the answer",
                "prompt",
                code="context_length_exceeded",
            )
        for token in ids:
            if not 0 <= token < self._vocabulary:
                raise BadRequest(f"{name} has token {shortened(token)}; the model knows 0 to {self._vocabulary - 1}", "prompt")


class Vocabulary:
    """What each token is, by itself. For one thread: tokenizers are not safe in several."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        anchor = tokenizer.encode("a", add_special_tokens=False)[-1:]
        self._anchor, self._anchor_text = anchor, str(tokenizer.decode(anchor))
        self.piece = functools.lru_cache(maxsize=1 << 17)(self._piece)
        """Id -> its text, with the space that it may start with; special tokens by name. A part of a character is U+FFFD."""

        self.is_special = functools.lru_cache(maxsize=1 << 17)(self._is_special)
        """Whether the tokenizer leaves the token out with skip_special_tokens."""

    def text_within(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """The text of tokens that come after others: at the start of a text some decoders leave out a space."""
        text = self._decode([*self._anchor, *ids], skip_special_tokens)
        return text[len(self._anchor_text) :] if text.startswith(self._anchor_text) else self._decode(ids, skip_special_tokens)

    def _decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False))

    def _piece(self, token: int) -> str:
        return self.text_within([token])

    def _is_special(self, token: int) -> bool:
        return bool(self.piece(token)) and not self.text_within([token], skip_special_tokens=True)

    def name(self, token: int) -> str:
        """The token as a string that no other token shares as often as U+FFFD: a part of a character in OpenAI's form, bytes:\\xe2."""
        piece = self.piece(token)
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in self.bytes(token)) if _UNFINISHED in piece else piece

    def bytes(self, token: int) -> list[int]:
        """The token's bytes in UTF-8."""
        piece = self.piece(token)
        if _UNFINISHED in piece:
            name = str(self.tokenizer.convert_ids_to_tokens(token))
            if len(name) == 6 and name.startswith("<0x"):  # a byte of a vocabulary with fall-back to bytes
                return [int(name[3:5], 16)]
            if all(letter in _byte_letters() for letter in name):
                return [_byte_letters()[letter] for letter in name]
        return list(piece.encode())


@functools.cache
def _byte_letters() -> dict[str, int]:
    """The letters of byte-level vocabularies: printable bytes are themselves, the others follow from U+0100 on (GPT-2's table)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("\u00a1"), ord("\u00ac") + 1), *range(ord("\u00ae"), ord("\u00ff") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


class ResponseText:
    """The text of a response that grows, without its end: a stop string, and what comes after it.

    The engine decides where a response ends: it looks for stop strings in the text with special tokens, which the client may not see.

    `add` returns what is certain of the text by now: not a part of a character, nor what may belong to a stop string. What `add` and
    `finish` return is, put together, the text of `whole`, however the tokens were cut.
    """

    def __init__(self, vocabulary: Vocabulary, stop: Sequence[str], skip_special_tokens: bool) -> None:
        self._vocabulary = vocabulary
        self._skip_special_tokens = skip_special_tokens
        self._stop = stop
        longest_stop = max(map(len, stop), default=0)
        self._window = 4 * longest_stop + 8
        """Tokens at the end of a response that a stop string can depend on: a character has at most 4 bytes, and a token one or more."""
        self._ids: list[int] = []
        self._start = 0
        """`_ids` from here on are decoded again."""
        self._read = 0
        """The tokens before this one are in the text that was returned, or in `_held`."""
        self._held = ""
        """Text that may belong to a stop string."""

    def add(self, ids: Sequence[int]) -> str:
        """The next tokens of the response; returns the text that is certain now and was not before."""
        return "".join(map(self._add, ids))

    def finish(self, finish_reason: str) -> str:
        """The rest of the text: the response has no more tokens, and ended for this reason."""
        text = self._held + self._new_text()
        self._held = ""
        self._read = len(self._ids)
        return text[: len(text) - self._num_cut(self._ids, finish_reason)]

    def whole(self, ids: Sequence[int], finish_reason: str) -> str:
        """The text of a response that is finished: what `add` and `finish` would return, in one step."""
        text = self._decode(ids)
        return text[: len(text) - self._num_cut(ids, finish_reason)]

    def _add(self, token: int) -> str:
        self._ids.append(token)
        new = self._new_text()
        if new.endswith(_UNFINISHED):
            return ""
        self._start = max(self._start, self._read - _LOOK_BACK)
        self._read = len(self._ids)
        text = self._held + new
        certain = len(text) - self._num_uncertain(self._ids)
        self._held = text[max(0, certain) :]
        return text[: max(0, certain)]

    def _new_text(self) -> str:
        """The text of the tokens from `_read` on."""
        if self._read == len(self._ids):
            return ""
        known = self._decode(self._ids[self._start : self._read])
        return self._decode(self._ids[self._start :])[len(known) :]

    def _decode(self, ids: Sequence[int]) -> str:
        return str(
            self._vocabulary.tokenizer.decode(
                list(ids), skip_special_tokens=self._skip_special_tokens, clean_up_tokenization_spaces=False
            )
        )

    def _num_cut(self, ids: Sequence[int], finish_reason: str) -> int:
        """Characters at the end of the visible text that belong to the stop string that ended the response, or come after it."""
        if not self._stop or finish_reason != "stop":
            return 0
        text, is_visible = self._last_characters(ids)
        start = self._stop_start(text)
        return 0 if start is None else sum(is_visible[start:])

    def _num_uncertain(self, ids: Sequence[int]) -> int:
        """Characters at the end of the visible text that a stop string may take away, now or with the next tokens."""
        if not self._stop:
            return 0
        text, is_visible = self._last_characters(ids)
        first = max(0, len(text) - max(map(len, self._stop)) + 1)
        starts = [start for start in range(first, len(text)) if any(string.startswith(text[start:]) for string in self._stop)]
        complete = self._stop_start(text)
        start = min([*starts[:1], *([] if complete is None else [complete])], default=len(text))
        return sum(is_visible[start:])

    def _stop_start(self, text: str) -> int | None:
        """Where the stop string starts that is complete first, the longest of several: there the engine ended."""
        ends = [(start + len(string), start) for string in self._stop if (start := text.find(string)) >= 0]
        return min(ends)[1] if ends else None

    def _last_characters(self, ids: Sequence[int]) -> tuple[str, list[bool]]:
        """The end of the text with special tokens, and for each character whether the client sees it."""
        text = ""
        is_visible: list[bool] = []
        last = list(ids[-self._window :])
        for skipped, group in itertools.groupby(
            last, lambda token: self._skip_special_tokens and self._vocabulary.is_special(token)
        ):
            part = self._vocabulary.text_within(list(group))
            text += part
            is_visible += [not skipped] * len(part)
        return text, is_visible
