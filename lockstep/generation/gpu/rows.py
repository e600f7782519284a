"""RowState: what the device knows of the sequences that are being decoded. A captured step reads and writes only this and the pages.

A row is a place in the batch; its sequence can move to another row between steps (`gather`). Row `capacity` is the scratch row: finished,
with no context and the scratch page; padding rows are copies of it. The host never reads single numbers: it takes a copy of the outputs
(`outputs`) every few steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lockstep.generation.gpu.attention import SharedPrefixes
from lockstep.generation.gpu.prefill import upload
from lockstep.workers.rollout.request import MOST_TOP

RING = 16
"""Tokens of a row that are kept for the host, which must look before they are overwritten."""

RUNNING, STOPPED, TOO_LONG, NOT_FINITE = range(4)
"""Values of `RowState.done`: not finished; a stop token was drawn; the limit is reached; a log-prob is not finite."""

LONGS = ("token", "key")
INTS = ("context", "generated", "limit", "position", "done", "greedy", "stops", "top_k")
FLOATS = ("inverse_temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
_NAMED = ("token", "key", "context", "generated", "limit", "position", "done", "greedy", "stops", "inverse_temperature")


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
    position: Tensor
    """[rows] int32: what `generated` is counted from where random numbers are made."""
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
    longs: Tensor
    """[LONGS, rows] int64: the numbers of each row that the host sets, in one block; `token` and `key` are its rows."""
    ints: Tensor
    """[INTS, rows] int32, likewise."""
    floats: Tensor
    """[FLOATS, rows] float32, likewise."""
    inverse_temperature: Tensor
    """[rows] float32"""
    greedy: Tensor
    """[rows] int32: 1 takes the most likely token."""
    stops: Tensor
    """[rows] int32: whether `stop` holds for it."""
    stop: Tensor
    """[vocabulary] uint8: 1 ends the response."""
    chunk_max: Tensor
    """[rows, chunks] float32: scratch of the sampler."""
    chunk_sum: Tensor
    """[rows, chunks] float32"""

    shared: SharedPrefixes
    """Which rows read their first pages together."""
    seen: Tensor | None = None
    """[rows, vocabulary] bool: tokens of the prompt and the response; only where a penalty is asked for."""
    counts: Tensor | None = None
    """[rows, vocabulary] int16: how often the response has a token, `token` itself not counted; with `seen`."""
    top_ids: Tensor | None = None
    """[rows, RING, MOST_TOP] int32: the most likely tokens at the places of `out_tokens`; only where they are asked for."""
    top_log_probs: Tensor | None = None
    """[rows, RING, MOST_TOP] float32"""

    @staticmethod
    def make(capacity: int, width: int, vocabulary: int, chunks: int, device: torch.device) -> RowState:
        """State for `capacity` rows of up to `width` pages, all of them padding."""
        rows = capacity + 1

        def zeros(*shape: int, kind: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(*shape, dtype=kind, device=device)

        longs = zeros(len(LONGS), rows, kind=torch.int64)
        ints = zeros(len(INTS), rows)
        floats = torch.ones(len(FLOATS), rows, device=device)
        ints[INTS.index("done")] = TOO_LONG
        blocks = (LONGS, longs), (INTS, ints), (FLOATS, floats)
        numbers = {name: row for names, block in blocks for name, row in zip(names, block, strict=True)}
        return RowState(
            longs=longs,
            ints=ints,
            floats=floats,
            **{name: numbers[name] for name in _NAMED},
            page_table=zeros(rows, width),
            out_tokens=zeros(rows, RING),
            out_log_probs=zeros(rows, RING, kind=torch.float32),
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
        for tensor in (self.page_table, self.seen, self.counts):
            if tensor is not None:
                tensor[: len(order)] = tensor[order]
        for block in (self.longs, self.ints, self.floats):
            block[:, : len(order)] = block[:, order]

    def clear(self, count: int | None = None) -> None:
        """The first `count` rows (None: all) become padding."""
        count = self.capacity if count is None else count
        for tensor in (self.page_table, self.seen, self.counts):
            if tensor is not None:
                tensor[:count] = tensor[self.capacity]
        for block in (self.longs, self.ints, self.floats):
            block[:, :count] = block[:, self.capacity :]

    def put(self, first: int, longs: np.ndarray, ints: np.ndarray, floats: np.ndarray) -> None:
        """Set the numbers of the rows `first`...: [LONGS, count], [INTS, count] and [FLOATS, count], which travel together."""
        kinds = (self.longs, longs, np.int64), (self.ints, ints, np.int32), (self.floats, floats, np.float32)
        blocks = [(block, np.ascontiguousarray(values, dtype=kind)) for block, values, kind in kinds]
        sent = upload(
            torch.from_numpy(np.concatenate([values.reshape(-1).view(np.uint8) for _, values in blocks])), self.token.device
        )
        for block, values in blocks:
            own = sent[: values.nbytes]
            sent = sent[values.nbytes :]
            block[:, first : first + values.shape[1]] = own.view(block.dtype).view(values.shape)

    def outputs(self, count: int) -> Tensor:
        """[count * (2 + 2 * RING)] int32: what the host reads of the first rows, in one piece (see `read_outputs`)."""
        parts = self.generated[:count], self.done[:count], self.out_tokens[:count], self.out_log_probs[:count].view(torch.int32)
        return torch.cat([part.flatten() for part in parts])

    def shared_of(self, size: int) -> SharedPrefixes:
        """`shared` for the first `size` rows: a group has two rows or more."""
        groups = max(1, size // 2)
        return SharedPrefixes(self.shared.first[:groups], self.shared.size[:groups], self.shared.tokens[:size])

    def option(self, name: str, rows: slice) -> Tensor:
        """[count, 1] of these rows: a number of INTS or FLOATS."""
        block, names = (self.ints, INTS) if name in INTS else (self.floats, FLOATS)
        return block[names.index(name), rows, None]

    def track_seen(self, wanted: bool) -> None:
        """Make or drop `seen` and `counts`. Graphs that use them must be forgotten when they are made anew."""
        shape = (len(self.token), len(self.stop))
        device = self.token.device
        self.seen = torch.zeros(shape, dtype=torch.bool, device=device) if wanted else None
        self.counts = torch.zeros(shape, dtype=torch.int16, device=device) if wanted else None

    def track_top(self) -> None:
        """Make `top_ids` and `top_log_probs`, unless they are there."""
        if self.top_ids is None:
            shape = (len(self.token), RING, min(MOST_TOP, len(self.stop)))
            device = self.token.device
            self.top_ids = torch.zeros(shape, dtype=torch.int32, device=device)
            self.top_log_probs = torch.zeros(shape, device=device)


def read_outputs(sent: Tensor, starts: Sequence[int]) -> tuple[list[int], list[int], list[list[int]], list[list[float]]]:
    """`generated` and `done` of the rows, from what `RowState.outputs` has sent, and RING of the tokens and log-probs of each: row i's from
    token number `starts[i]` on, of which those before `generated` mean something."""
    count = len(sent) // (2 + 2 * RING)
    generated, done, tokens, log_probs = np.split(sent.numpy(), [count, 2 * count, (2 + RING) * count])
    places = (np.array(starts, dtype=np.int64)[:, None] + np.arange(RING)) % RING
    tokens, log_probs = (np.take_along_axis(each.reshape(count, RING), places, axis=1) for each in (tokens, log_probs))
    return generated.tolist(), done.tolist(), tokens.tolist(), log_probs.view(np.float32).tolist()
