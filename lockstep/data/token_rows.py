"""Marked texts to token ids and masks, and these to the columns of a batch.

A token is trained where one of its characters is; the fast tokenizer's offsets say which characters it stands for. Pad ids play no part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from lockstep.data.conversations import ChatTemplate, MarkedText
from lockstep.data.encoder import truncate
from lockstep.errors import DataError
from lockstep.protocol import Column, Ragged

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class TokenRow:
    """The tokens of a text, as arrays of one entry per token."""

    text: str
    ids: np.ndarray
    trained: np.ndarray
    starts: np.ndarray
    ends: np.ndarray
    """The characters that the token stands for. A token that was added stands for none."""

    def __len__(self) -> int:
        return len(self.ids)

    def select(self, positions: Sequence[int] | slice) -> TokenRow:
        """The tokens at these positions."""
        return TokenRow(self.text, *(array[positions] for array in (self.ids, self.trained, self.starts, self.ends)))

    @property
    def num_prompt(self) -> int:
        """Tokens before the first trained one. The first of all has nothing that predicts it, and is never trained."""
        return 1 + int(self.trained[1:].argmax())

    def num_bytes(self, special_ids: np.ndarray) -> int:
        """UTF-8 bytes that the trained tokens stand for, special ones aside: what bits per byte are counted by."""
        kept = self.trained & ~np.isin(self.ids, special_ids)
        kept[:1] = False
        starts = self.starts[kept]
        ends = self.ends[kept]
        if not len(ends):
            return 0
        # The tokens of a character that is split have its offsets each; it counts once.
        starts = np.maximum(starts, np.concatenate([[0], np.maximum.accumulate(ends)[:-1]]))
        pieces = (self.text[start:end] for start, end in zip(starts, ends, strict=True) if start < end)
        return int(np.maximum(ends - starts, 0).sum()) if self.text.isascii() else sum(len(piece.encode()) for piece in pieces)


class SpanTokenizer:
    """Marked texts to tokens. Raises DataError for a tokenizer without offsets, or without an end token."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        if not tokenizer.is_fast:
            raise DataError(
                f"{type(tokenizer).__name__} does not say which characters a token stands for, which masks are made of; "
                "use the model's fast tokenizer (a folder with tokenizer.json)"
            )
        if tokenizer.eos_token_id is None:
            raise DataError("the tokenizer has no eos_token, which ends what is trained; set it in tokenizer_config.json")
        self._tokenizer = tokenizer
        special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special} | {*tokenizer.all_special_ids}
        self.special_ids = np.array(sorted(special), dtype=np.int64)

    def __call__(self, texts: Sequence[MarkedText]) -> list[TokenRow]:
        """The tokens of each text. One that no template rendered begins and ends with the tokenizer's own tokens; its end is trained."""
        rows: list[TokenRow] = [None] * len(texts)  # type: ignore[list-item]
        for is_rendered in (True, False):
            here = [i for i, text in enumerate(texts) if text.is_rendered == is_rendered]
            if not here:
                continue
            # One call for all: a fast tokenizer encodes them in threads of its own.
            encoded = self._tokenizer(
                [texts[i].text for i in here],
                add_special_tokens=not is_rendered,
                return_offsets_mapping=True,
                return_attention_mask=False,
                return_token_type_ids=False,
                verbose=False,
            )
            for i, ids, offsets in zip(here, encoded["input_ids"], encoded["offset_mapping"], strict=True):
                rows[i] = self._row(texts[i], np.array(ids, dtype=np.int64), np.array(offsets, dtype=np.int64).reshape(-1, 2))
        return rows

    def _row(self, text: MarkedText, ids: np.ndarray, offsets: np.ndarray) -> TokenRow:
        starts, ends = offsets.T
        if len(ends):
            # Some tokenizers leave blanks out of offsets: a token of blanks alone then has none, and stands for those before it.
            before = np.concatenate([[0], np.maximum.accumulate(ends)[:-1]])
            starts = np.where(starts == ends, np.minimum(starts, before), starts)
        trained = np.zeros(len(ids), dtype=bool)
        for start, end in text.spans:
            trained |= (starts < end) & (np.maximum(ends, starts + 1) > start)
        row = TokenRow(text.text, ids, trained, starts, ends)
        return row if text.is_rendered else self._with_ends(row)

    def _with_ends(self, row: TokenRow) -> TokenRow:
        """One begin token, where the text has its own besides the tokenizer's; one end token, trained."""
        bos = self._tokenizer.bos_token_id
        eos = self._tokenizer.eos_token_id
        if bos is not None and len(row) > 1 and row.ids[0] == row.ids[1] == bos:
            row = row.select(slice(1, None))
        if not len(row) or row.ids[-1] != eos:
            return self._append_end(row)
        row.trained[-1] = True
        return row

    def ended(self, row: TokenRow) -> TokenRow:
        """The row with the end token, trained, unless it ends with a special token already, such as a template's end of turn."""
        last = next((i for i in range(len(row) - 1, 0, -1) if not row.text[row.starts[i] : row.ends[i]].isspace()), 0)
        return row if row.ids[last] in self.special_ids else self._append_end(row)

    def _append_end(self, row: TokenRow) -> TokenRow:
        end = len(row.text)
        added = (self._tokenizer.eos_token_id, True, end, end)
        arrays = (row.ids, row.trained, row.starts, row.ends)
        return TokenRow(row.text, *(np.append(array, value) for array, value in zip(arrays, added, strict=True)))


class TooLong(DataError):
    """A row does not fit into data.max_length; `needed` is a length with which it does."""

    def __init__(self, message: str, needed: int) -> None:
        super().__init__(message, key="data.max_length")
        self.needed = needed

    def __reduce__(self) -> tuple[type[TooLong], tuple[str, int]]:
        return type(self), (str(self), self.needed)

    @classmethod
    def of(cls, length: int, max_length: int) -> TooLong:
        """The error about a row of so many tokens, which is not to be cut."""
        return cls(
            f"the row has {length} tokens up to its last trained one, more than data.max_length={max_length}; raise it, set "
            "data.truncation to left, right or middle, or leave such rows out with data.filter_overlong_rows=true",
            length,
        )


def up_to_last_trained(row: TokenRow) -> TokenRow:
    """Without the tokens after the last trained one, which change nothing. Raises DataError when no token is trained."""
    if not row.trained[1:].any():
        raise DataError("nothing of the row is trained: it has no assistant message, none that may be trained, or no text")
    return row.select(slice(0, int(np.flatnonzero(row.trained)[-1]) + 1))


def fit(row: TokenRow, max_length: int, truncation: str) -> TokenRow:
    """The row in at most `max_length` tokens. Raises TooLong when it is longer and `truncation` is "error", or leaves nothing trained."""
    if len(row) <= max_length:
        return row
    if truncation == "error":
        raise TooLong.of(len(row), max_length)
    cut = row.select(truncate(list(range(len(row))), max_length, truncation))
    if not cut.trained[1:].any():
        raise TooLong(f"data.truncation={truncation} to {max_length} of {len(row)} tokens leaves nothing that is trained", len(row))
    return up_to_last_trained(cut)


def columns(rows: Sequence[TokenRow], cuts: Sequence[int]) -> dict[str, Column]:
    """`prompts` (the tokens before the cut), `responses` and `response_mask`, as `lockstep.protocol` lists them."""
    parts = [(row.ids[:cut], row.ids[cut:], row.trained[cut:]) for row, cut in zip(rows, cuts, strict=True)]
    names = ("prompts", "responses", "response_mask")
    return {name: _ragged(column) for name, column in zip(names, zip(*parts, strict=True), strict=True)}


def _ragged(rows: Sequence[np.ndarray]) -> Ragged:
    return Ragged.from_rows([torch.from_numpy(row.astype(np.int64)) for row in rows], dtype=torch.int64)


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
