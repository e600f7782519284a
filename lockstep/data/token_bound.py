"""A bound on the number of a text's tokens that needs no tokenising."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_HARMLESS = {"NFC", "NFD", "Strip", "Split", "Digits", "Punctuation", "Whitespace", "WhitespaceSplit"}
"""Parts of a tokenizer that never add a character (Unicode normal forms of text that is not ASCII aside)."""
_UNICODE_GROWTH = 3
"""How many times longer, in UTF-8, a Unicode normal form (NFC, NFD) can be than text that is not plain ASCII."""


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
