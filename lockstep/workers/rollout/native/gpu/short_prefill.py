"""ShortPrefill: few new tokens, computed as a captured decode step in which every token is a row of its own.

A prefill launches its kernels one by one. With few tokens that takes the host far longer than the device, and a stream meets it whenever
one request arrives or a conversation goes on. Each token reads the keys before it by itself, so this pays only while those are few.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from lockstep.workers.rollout.native.gpu.prefill import upload

SIZES = (16, 32, 64, 128, 256, 512, 1024)
"""Numbers of tokens that are captured."""
_MOST_KEYS = 1 << 19
"""Keys that all tokens read together: a few milliseconds for a model of 1.5 billion parameters."""


class Decoder(Protocol):
    """What FusedDecoder has."""

    def hidden(self, tokens: Tensor, positions: Tensor, slots: Tensor, page_table: Tensor, context_lens: Tensor) -> Tensor:
        """[rows, hidden] after one new token for each row."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, vocabulary] float32."""
        ...


class ShortPrefill:
    """Over rows of `width` pages. On a device without CUDA graphs each step is simply computed."""

    def __init__(self, decoder: Decoder, width: int, device: torch.device) -> None:
        self._decoder, self._width, self._device = decoder, width, device
        self._numbers = torch.zeros(3, SIZES[-1], dtype=torch.int64, device=device)
        """Token, position and slot of each."""
        self._tables = torch.zeros(SIZES[-1], width, dtype=torch.int32, device=device)
        self._graphs: dict[int, tuple[Any, Tensor]] = {}
        """Size -> the graph and where it writes."""

    def takes(self, lengths: Sequence[int], contexts: Sequence[int]) -> bool:
        """Whether it pays for rows of so many new tokens after so many that are in the cache."""
        keys = sum(length * (context + length) for length, context in zip(lengths, contexts, strict=True))
        return sum(lengths) <= SIZES[-1] and keys <= _MOST_KEYS

    def logits(self, packed: np.ndarray, lengths: Sequence[int], pages: Sequence[Sequence[int]], last: Tensor) -> Tensor:
        """[last, vocabulary] float32 at the tokens `last` of `packed` [token, position, slot; N], which are `lengths` of each row; row i
        has `pages[i]`."""
        count = packed.shape[1]
        size = next(size for size in SIZES if size >= count)
        numbers = np.zeros((4, size), dtype=np.int64)  # what is no token writes to the scratch page
        numbers[:3, :count] = packed
        numbers[3, :count], numbers[3, count:] = np.repeat(np.arange(len(lengths)), lengths), len(lengths)
        tables = np.zeros((len(lengths) + 1, self._width), dtype=np.int32)
        for table, own in zip(tables, pages, strict=False):
            table[: len(own)] = own
        sent = upload(torch.from_numpy(numbers), self._device)
        self._numbers[:, :size] = sent[:3]
        self._tables[:size] = upload(torch.from_numpy(tables), self._device)[sent[3]]
        return self._decoder.logits(self._computed(size)[last])

    def forget(self) -> None:
        """Drop the graphs and the memory they hold."""
        self._graphs.clear()

    def _computed(self, size: int) -> Tensor:
        """Hidden states of the first `size` tokens."""
        if size in self._graphs:
            graph, hidden = self._graphs[size]
            graph.replay()
            return hidden
        hidden = self._step(size)  # compiles what is not compiled yet, which must not happen inside a capture
        if self._device.type == "cuda":
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                captured = self._step(size)
            self._graphs[size] = graph, captured
        return hidden

    def _step(self, size: int) -> Tensor:
        tokens, positions, slots = self._numbers[:, :size]
        return self._decoder.hidden(tokens, positions, slots, self._tables[:size], positions.int())
