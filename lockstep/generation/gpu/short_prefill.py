"""ShortPrefill: new tokens, computed as a captured decode step in which every token is a row of its own.

A prefill launches its kernels one by one, which takes the host about as long as the device computes 8,192 tokens. A stream meets it
whenever a request arrives or a conversation goes on. Long rows are cut into blocks of tokens that read their pages together
(block_attention.py); their last block is filled up with tokens that write to the scratch page.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from lockstep.generation.gpu.prefill import Staged

SIZES = (16, 32, 64, 128, 256, 512, 1024, 1536, 2048, 3072, 4096, 5120, 6144, 7168, 8192, 8448, 9216)
"""Numbers of tokens that are captured. The last two hold a pass of 8,192 whose rows are filled up."""
_MOST_KEYS = 1 << 26
"""Keys that all tokens see together: beyond them the device takes longer than the host, and flash attention less than blocks."""
_MANY = 2
"""How many times as large blocks are where there are many tokens."""
_FEW = 1024
"""Up to so many tokens blocks are small, or single tokens, and a size is captured when it is first needed: somebody waits for the answer.
Beyond them it is captured when it comes again."""


class Decoder(Protocol):
    """What FusedDecoder has."""

    def hidden(self, tokens: Tensor, positions: Tensor, slots: Tensor, page_table: Tensor, context_lens: Tensor) -> Tensor:
        """[rows, hidden] after one new token for each row; or, with a line of `page_table` for several rows, after blocks of tokens."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, vocabulary] float32."""
        ...


class ShortPrefill:
    """Over rows of `width` pages, in blocks of `block` tokens. On a device without CUDA graphs each step is simply computed."""

    def __init__(self, decoder: Decoder, width: int, block: int, device: torch.device) -> None:
        self._decoder = decoder
        self._width = width
        self._block = block
        self._device = device
        # Places of wanted tokens may be twice as many as tokens: where a prompt's log-probs are wanted, and its last token's to draw from.
        length = max(self._length(_FEW, 1) + 2 * _FEW, self._length(SIZES[-1], block) + 2 * SIZES[-1])
        self._inputs = torch.zeros(length, dtype=torch.int64, device=device)
        """What a step reads, in one piece, so that one copy brings it (see `_parts`)."""
        self._staged = Staged(self._inputs)
        self._graphs: dict[tuple[int, int], tuple[Any, Tensor]] = {}
        """(tokens, tokens of a block) -> the graph and where it writes."""
        self._pool: Any = None
        """Their memory, but for what they write: they are replayed one after the other."""
        self._asked: set[int] = set()
        """Sizes that were asked for, whether or not they are captured."""

    def takes(self, lengths: Sequence[int], contexts: Sequence[int]) -> bool:
        """Whether it pays for rows of so many new tokens after so many that are in the cache."""
        block = self._block_of(lengths)
        total = sum(self._padded(lengths, block))
        keys = sum(length * (context + length) for length, context in zip(lengths, contexts, strict=True))
        if keys > _MOST_KEYS or total > (SIZES[-1] if block > 1 else _FEW):
            return False
        if total <= _FEW:
            return True
        size = _size_of(total)
        if size in self._asked:
            return True
        self._asked.add(size)
        return False

    def logits(self, packed: np.ndarray, lengths: Sequence[int], pages: Sequence[Sequence[int]], wanted: np.ndarray) -> Tensor:
        """[wanted, vocabulary] float32 at the tokens `wanted` of `packed` [token, position, slot; N], which are `lengths` of each row.
        Row i has `pages[i]`."""
        block = self._block_of(lengths)
        padded = self._padded(lengths, block)
        size = _size_of(sum(padded))
        numbers_end = 3 * size
        length = self._length(size, block)
        sent = self._staged.zeros(length + len(wanted))
        numbers = sent[:numbers_end].reshape(3, size)
        tables = sent[numbers_end:length].view(np.int32)[: size // block * self._width].reshape(-1, self._width)
        # A row's tokens are computed from `place` on; what fills it up has its last token and position, and writes to the scratch page.
        place = start = line = 0
        moves = np.empty(len(lengths), dtype=np.int64)
        for i, (count, filled, own) in enumerate(zip(lengths, padded, pages, strict=True)):
            end = start + count
            numbers[:, place : place + count] = packed[:, start:end]
            numbers[:2, place + count : place + filled] = packed[:2, end - 1 : end]
            tables[line : line + filled // block, : len(own)] = own
            moves[i] = place - start
            place = place + filled
            start = end
            line = line + filled // block
        sent[length:] = wanted + np.repeat(moves, lengths)[wanted]
        self._staged.send(len(sent))
        return self._decoder.logits(self._computed(size, block)[self._inputs[length : len(sent)]])

    def forget(self) -> None:
        """Drop the graphs and the memory they hold."""
        self._graphs.clear()
        self._pool = None

    def _block_of(self, lengths: Sequence[int]) -> int:
        """Large blocks for many tokens; blocks of one token where most of a block would be filled up."""
        total = sum(lengths)
        for block in (_MANY * self._block, self._block) if total > _FEW else (self._block,):
            if sum(self._padded(lengths, block)) <= (1.25 if block > self._block else 2) * total:
                return block
        return 1

    @staticmethod
    def _padded(lengths: Sequence[int], block: int) -> list[int]:
        return [-(-length // block) * block for length in lengths]

    def _computed(self, size: int, block: int) -> Tensor:
        """Hidden states of the first `size` tokens."""
        if (size, block) in self._graphs:
            graph, hidden = self._graphs[size, block]
            graph.replay()
            return hidden
        hidden = self._step(size, block)  # compiles what is not compiled yet, which must not happen inside a capture
        if self._device.type == "cuda":
            graph = torch.cuda.CUDAGraph()
            if self._pool is None:
                self._pool = torch.cuda.graph_pool_handle()
            with torch.cuda.graph(graph, pool=self._pool):
                captured = self._step(size, block)
            self._graphs[size, block] = graph, captured
        return hidden

    def _step(self, size: int, block: int) -> Tensor:
        (tokens, positions, slots), tables = self._parts(self._inputs, size, block)
        return self._decoder.hidden(tokens, positions, slots, tables, positions.int())

    def _length(self, size: int, block: int) -> int:
        return 3 * size + -(-size // block * self._width // 2)

    def _parts(self, inputs: Tensor, size: int, block: int) -> tuple[Tensor, Tensor]:
        """Views of what a step reads: token, position and slot of each [3, size] int64, and the page table of each block [size / block,
        width] int32."""
        tables = inputs[3 * size : self._length(size, block)].view(torch.int32)
        return inputs[: 3 * size].view(3, size), tables[: size // block * self._width].view(-1, self._width)


def _size_of(total: int) -> int:
    return next(size for size in SIZES if size >= total)
