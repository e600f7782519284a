"""ShortPrefill: few new tokens, computed as a captured decode step in which every token is a row of its own.

A prefill launches its kernels one by one. With few tokens that takes the host far longer than the device, and a stream meets it whenever
one request arrives or a conversation goes on. Long rows are cut into blocks of tokens that read their pages together (block_attention.py);
their last block is filled up with tokens that write to the scratch page.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from lockstep.workers.rollout.native.gpu.prefill import Staged

SIZES = (16, 32, 64, 128, 256, 512, 1024)
"""Numbers of tokens that are captured."""
_MOST_KEYS = 1 << 20
"""Keys that all tokens see together: beyond them, flash attention of a prefill that is not captured is as fast."""


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
        self._decoder, self._width, self._block, self._device = decoder, width, block, device
        # Places of wanted tokens may be twice as many as tokens: where a prompt's log-probs are wanted, and its last token's to draw from.
        self._inputs = torch.zeros(5 * SIZES[-1] + SIZES[-1] * width // 2 + 1, dtype=torch.int64, device=device)
        """What a step reads, in one piece, so that one copy brings it (see `_parts`)."""
        self._staged = Staged(self._inputs)
        self._graphs: dict[tuple[int, int], tuple[Any, Tensor]] = {}
        """(tokens, tokens of a block) -> the graph and where it writes."""

    def takes(self, lengths: Sequence[int], contexts: Sequence[int]) -> bool:
        """Whether it pays for rows of so many new tokens after so many that are in the cache."""
        keys = sum(length * (context + length) for length, context in zip(lengths, contexts, strict=True))
        return sum(self._padded(lengths)) <= SIZES[-1] and keys <= _MOST_KEYS

    def logits(self, packed: np.ndarray, lengths: Sequence[int], pages: Sequence[Sequence[int]], wanted: np.ndarray) -> Tensor:
        """[wanted, vocabulary] float32 at the tokens `wanted` of `packed` [token, position, slot; N], which are `lengths` of each row.
        Row i has `pages[i]`."""
        block, padded = self._block_of(lengths), self._padded(lengths)
        total = sum(padded)
        size = next(size for size in SIZES if size >= total)
        numbers_end, length = 3 * size, self._length(size, block)
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
            place, start, line = place + filled, end, line + filled // block
        sent[length:] = wanted + np.repeat(moves, lengths)[wanted]
        self._staged.send(len(sent))
        return self._decoder.logits(self._computed(size, block)[self._inputs[length : len(sent)]])

    def forget(self) -> None:
        """Drop the graphs and the memory they hold."""
        self._graphs.clear()

    def _block_of(self, lengths: Sequence[int]) -> int:
        """Blocks of one token where most of a block would be filled up."""
        padded = sum(-(-length // self._block) for length in lengths) * self._block
        return self._block if padded <= 2 * sum(lengths) else 1

    def _padded(self, lengths: Sequence[int]) -> list[int]:
        block = self._block_of(lengths)
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
            with torch.cuda.graph(graph):
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
