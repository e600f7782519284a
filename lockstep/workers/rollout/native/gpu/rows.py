"""RowState: what the device knows of the sequences that are being decoded. A captured step reads and writes only this and the pages.

A row is a place in the batch; its sequence can move to another row between steps (`gather`). Row `capacity` is the scratch row: finished,
with no context and the scratch page; padding rows are copies of it. The host never reads single numbers: it takes a copy of the outputs
(`outputs`) every few steps.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.workers.rollout.native.gpu.attention import SharedPrefixes

RING = 16
"""Tokens of a row that are kept for the host, which must look before they are overwritten."""

RUNNING, STOPPED, TOO_LONG, NOT_FINITE = range(4)
"""Values of `RowState.done`: not finished; a stop token was drawn; the limit is reached; a log-prob is not finite."""


@dataclass(slots=True)
class RowState:
    """Tensors of fixed address, so that captured graphs stay valid. The first dimension of row tensors is capacity + 1."""

    token: Tensor
    """[rows] int64: the last token, whose key and value are not in the cache yet."""
    context: Tensor
    """[rows] int32: tokens in the cache."""
    generated: Tensor
    """[rows] int32: tokens of the response so far."""
    limit: Tensor
    """[rows] int32: the longest response."""
    done: Tensor
    """[rows] int32: RUNNING or why it ended. A finished row is computed with the others and changes nothing."""
    key: Tensor
    """[rows] int64: `sampling.request_keys` of the request."""
    page_table: Tensor
    """[rows, width] int32"""
    out_tokens: Tensor
    """[rows, RING] int32: token number i of the response is at i % RING."""
    out_log_probs: Tensor
    """[rows, RING] float32"""
    inverse_temperature: Tensor
    """[1] float32"""
    greedy: Tensor
    """[1] int32: 1 takes the most likely token."""
    stop: Tensor
    """[vocabulary] uint8: 1 ends the response."""
    chunk_max: Tensor
    """[rows, chunks] float32: scratch of the sampler."""
    chunk_sum: Tensor
    """[rows, chunks] float32"""

    shared: SharedPrefixes
    """Which rows read their first pages together."""
    seen: Tensor | None = None
    """[rows, vocabulary] bool: tokens of the prompt and the response; only where a repetition penalty is asked for."""

    @staticmethod
    def make(capacity: int, width: int, vocabulary: int, chunks: int, device: torch.device) -> RowState:
        """State for `capacity` rows of up to `width` pages, all of them padding."""
        rows = capacity + 1

        def zeros(*shape: int, kind: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(*shape, dtype=kind, device=device)

        return RowState(
            token=zeros(rows, kind=torch.int64),
            context=zeros(rows),
            generated=zeros(rows),
            limit=zeros(rows),
            done=zeros(rows) + TOO_LONG,
            key=zeros(rows, kind=torch.int64),
            page_table=zeros(rows, width),
            out_tokens=zeros(rows, RING),
            out_log_probs=zeros(rows, RING, kind=torch.float32),
            inverse_temperature=torch.ones(1, device=device),
            greedy=zeros(1),
            stop=zeros(vocabulary, kind=torch.uint8),
            chunk_max=zeros(rows, chunks, kind=torch.float32),
            chunk_sum=zeros(rows, chunks, kind=torch.float32),
            shared=SharedPrefixes(zeros(rows), zeros(rows), zeros(rows)),
        )

    @property
    def capacity(self) -> int:
        """Rows that sequences can have."""
        return len(self.token) - 1

    def gather(self, order: Tensor) -> None:
        """Row i becomes what row `order[i]` was, for the first len(order) rows; `capacity` makes a padding row."""
        for tensor in (self.token, self.context, self.generated, self.limit, self.done, self.key, self.page_table, self.seen):
            if tensor is not None:
                tensor[: len(order)] = tensor[order]

    def shared_of(self, size: int) -> SharedPrefixes:
        """`shared` for the first `size` rows: a group has two rows or more."""
        groups = max(1, size // 2)
        return SharedPrefixes(self.shared.first[:groups], self.shared.size[:groups], self.shared.tokens[:size])

    def track_seen(self, wanted: bool) -> None:
        """Make or drop `seen`. Graphs that use it must be forgotten when it is made anew."""
        shape = len(self.token), len(self.stop)
        self.seen = torch.zeros(shape, dtype=torch.bool, device=self.token.device) if wanted else None

    def clear(self) -> None:
        """All rows become padding."""
        self.gather(torch.full((self.capacity,), self.capacity, device=self.token.device))
