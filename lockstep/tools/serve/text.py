"""Token ids as text: one token by itself, and a response as it grows."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_UNFINISHED = "\ufffd"
"""What a decoder writes for bytes that are no character yet."""
_LOOK_BACK = 4
"""Tokens before a new one that its text can depend on: a character has at most four bytes, and a token one or more of them."""


class Vocabulary:
    """What each token is, by itself. For one thread: tokenizers are not safe in several."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        anchor = tokenizer.encode("a", add_special_tokens=False)[-1:]
        self._anchor, self._anchor_text = anchor, str(tokenizer.decode(anchor))
        self.piece = functools.lru_cache(maxsize=1 << 17)(self._piece)
        """Id -> its text, with the space that it may start with; special tokens by name. A part of a character is U+FFFD."""

    def _piece(self, token: int) -> str:
        # After another token: at the start of a text some decoders leave out a space.
        text = str(self.tokenizer.decode([*self._anchor, token], skip_special_tokens=False))
        return text[len(self._anchor_text) :] if text.startswith(self._anchor_text) else str(self.tokenizer.decode([token]))

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

    `add` returns what is certain of the text by now: not a part of a character, nor what may become a stop string. What `add` and `finish`
    return is, put together, the same however the tokens were cut.
    """

    def __init__(self, vocabulary: Vocabulary, stop: Sequence[str], skip_special_tokens: bool) -> None:
        self._decode = functools.partial(
            vocabulary.tokenizer.decode, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        self._stop = stop
        self._ids: list[int] = []
        self._start = self._read = 0
        """`_ids` from `_start` are decoded again; those before `_read` have been given out as text."""
        self._held = ""
        """Text that may be the beginning of a stop string."""
        self._is_over = False

    def add(self, ids: Sequence[int]) -> str:
        """The next tokens of the response; returns the text that is certain now and was not before."""
        return "".join(map(self._add, ids))

    def whole(self, ids: Sequence[int]) -> str:
        """The text of a response that is finished: what `add` and `finish` would give, in one step."""
        return self._cut(str(self._decode(list(ids))))

    def finish(self) -> str:
        """The rest of the text: the response has no more tokens."""
        if self._is_over:
            return ""
        text = self._cut(self._held + self._new_text())
        self._is_over, self._held = True, ""
        return text

    def _add(self, token: int) -> str:
        if self._is_over:
            return ""
        self._ids.append(token)
        new = self._new_text()
        if new.endswith(_UNFINISHED):
            return ""
        self._start, self._read = max(self._start, self._read - _LOOK_BACK), len(self._ids)
        text = self._cut(self._held + new)
        keep = 0 if self._is_over else self._may_become_stop(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def _new_text(self) -> str:
        """The text of the tokens from `_read` on."""
        if self._read == len(self._ids):
            return ""
        known = str(self._decode(self._ids[self._start : self._read]))
        return str(self._decode(self._ids[self._start :]))[len(known) :]

    def _cut(self, text: str) -> str:
        """`text` up to the stop string that is complete first, the longest of several: there the engine ended."""
        ends = [(start + len(string), start) for string in self._stop if (start := text.find(string)) >= 0]
        if not ends:
            return text
        self._is_over = True
        return text[: min(ends)[1]]

    def _may_become_stop(self, text: str) -> int:
        """How many characters at the end of `text` are the beginning of a stop string."""
        most = max((len(string) - 1 for string in self._stop), default=0)
        for count in range(min(most, len(text)), 0, -1):
            if any(string.startswith(text[-count:]) for string in self._stop):
                return count
        return 0
