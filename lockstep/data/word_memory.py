"""WordMemory: the ids of plain text under a byte-level BPE tokenizer, word by word from a dict.

Such a tokenizer cuts text at its added tokens, cuts the rest into words with one regular expression, and encodes each
word by itself. Most words of a dataset come again and again, so their ids are remembered, which is several times faster
than the tokenizer. The ids of a new word come from the tokenizer's own model. What lies outside of this (another kind of
tokenizer, text with other characters than ASCII and common punctuation) is not guessed at: the caller asks the tokenizer
itself.
"""

from __future__ import annotations

import json
import re
from itertools import chain
from typing import TYPE_CHECKING, Any

from tokenizers import pre_tokenizers

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_MAX_WORDS = 2**18
_SHORT_PART = 64
"""Parts between added tokens up to this long are remembered whole: most are the template's."""
_NOT_PLAIN = re.compile("[^\\x00-\\x1b -\\x7f\u2018\u2019\u201c\u201d\u2013\u2014\u2026\u00a3\u20ac\u00b0\u00d7]")
"""Plain are ASCII and a few characters that are neither letters, digits nor white space and have one normal form. Not plain are the ASCII
separators 1c to 1f: white space to Python's `re`, not to the tokenizer's expressions.
"""
_GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""What ByteLevel(use_regex=True) cuts with."""
_ASCII_CLASSES = {r"\p{L}": "a-zA-Z", r"\p{N}": "0-9", r"\p{Lu}": "A-Z", r"\p{Ll}": "a-z"}
_PROBES = (
    "She'll sell 1,234.50 shells; WE'RE 'S 7x8=56?  ",
    "  two  spaces\n\n\n three\r\nlines\t\ttabs \n ",
    "def f(x_1): return {'a': x_1**2, \"b\": [1, 22, 333, 4444]}  # !?...--==>>",
    "\\frac{1}{2}$x^2$ `code` <b>#### -72</b> a@b.c/d?e=f&g  A\n",
)


class WordMemory:
    """Made by `WordMemory.of`. `encode` adds no special tokens and finds the added tokens that are in the text."""

    def __init__(self, backend: Tokenizer, words: re.Pattern[str]) -> None:
        added = {token.content: index for index, token in backend.get_added_tokens_decoder().items()}
        self._parts = {content: [index] for content, index in added.items()}
        # Of several added tokens that begin at one place the longest wins.
        alternatives = "|".join(map(re.escape, sorted(added, key=len, reverse=True)))
        self._cut = re.compile(f"({alternatives})") if added else None
        self._words = words
        self._ids = _Ids(backend.model)

    @classmethod
    def of(cls, tokenizer: Any) -> WordMemory | None:
        """The memory of a transformers tokenizer; None for one of another kind, or when a few probes do not come out the same."""
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None or getattr(tokenizer, "split_special_tokens", False):
            return None
        words = _words_of(backend)
        if words is None:
            return None
        memory = cls(backend, words)
        expected = tokenizer(list(_PROBES), add_special_tokens=False)["input_ids"]
        return memory if [memory.encode(probe) for probe in _PROBES] == expected else None

    def encode(self, text: str) -> list[int] | None:
        """The ids of `text`; None when it is not plain, or has characters that no word takes in."""
        if _NOT_PLAIN.search(text):
            return None
        ids: list[int] = []
        for part in self._cut.split(text) if self._cut else [text]:
            known = self._parts.get(part)
            if known is None:
                words = self._words.findall(part)
                if "".join(words) != part:
                    return None
                known = list(chain.from_iterable(map(self._ids.__getitem__, words)))
                if len(part) <= _SHORT_PART and len(self._parts) < _MAX_WORDS:
                    self._parts[part] = known
            ids += known
        return ids


class _Ids(dict[str, list[int]]):
    """Word -> its ids. Starts anew when it holds `_MAX_WORDS`."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self._model, self._to_bytes = model, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)

    def __missing__(self, word: str) -> list[int]:
        if len(self) >= _MAX_WORDS:
            self.clear()
        ((mapped, _),) = self._to_bytes.pre_tokenize_str(word)
        ids = self[word] = [token.id for token in self._model.tokenize(mapped)]
        return ids


def _words_of(backend: Tokenizer) -> re.Pattern[str] | None:
    """The regular expression that cuts words, written for ASCII; None when the tokenizer does something else as well."""
    model, normalizer, pre_tokenizer = backend.model, backend.normalizer, backend.pre_tokenizer
    if type(model).__name__ != "BPE" or model.dropout or pre_tokenizer is None:
        return None
    if normalizer is not None and _state(normalizer) != {"type": "NFC"}:
        return None
    if any(t.single_word or t.lstrip or t.rstrip or t.normalized for t in backend.get_added_tokens_decoder().values()):
        return None
    state = _state(pre_tokenizer)
    steps = state["pretokenizers"] if state["type"] == "Sequence" else [state]
    last = steps[-1]
    if last["type"] != "ByteLevel" or last["add_prefix_space"] or len(steps) != (1 if last["use_regex"] else 2):
        return None
    if last["use_regex"]:
        return _for_ascii(_GPT2_WORDS)
    split = steps[0]
    if split["type"] != "Split" or "Regex" not in split["pattern"] or split["behavior"] != "Isolated" or split["invert"]:
        return None
    return _for_ascii(split["pattern"]["Regex"])


def _for_ascii(pattern: str) -> re.Pattern[str] | None:
    r"""The pattern with \p{...} as ranges of ASCII letters and digits; None for what Python's `re` reads differently."""
    if any(sign in pattern for sign in ("&&", "[[", "[:", "(?<", r"\h", r"\P", "^^")):
        return None
    inside, pieces = False, []
    for token in re.findall(r"\\p\{[^}]*\}|\\.|.", pattern, re.DOTALL):
        if token.startswith(r"\p"):
            if token not in _ASCII_CLASSES:
                return None
            token = _ASCII_CLASSES[token] if inside else f"[{_ASCII_CLASSES[token]}]"
        elif token in "[]":
            inside = token == "["
        pieces.append(token)
    try:
        compiled = re.compile("".join(pieces))
    except re.error:
        return None
    # findall gives groups instead of matches where there are groups; a word is never empty.
    return compiled if compiled.groups == 0 and not compiled.match("") else None


def _state(component: Any) -> dict[str, Any]:
    """The settings of a part of a tokenizer, as tokenizer.json has them."""
    return json.loads(component.__getstate__())
