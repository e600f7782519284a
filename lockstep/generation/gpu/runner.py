"""DecodeRunner: one whole decode step, from the last token's embedding to the next token's bookkeeping, as a CUDA graph a batch size.

A graph computes a fixed number of rows, so the live rows are rounded up to the next of `BUCKETS`; the rest is padding. Graphs are captured
when a size is first needed. They hold addresses: of the rows, the pages and the parameters. Parameters may change in place between
replays; when they move, the owner calls `forget`.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lockstep.generation.gpu.attention import decode_slots
from lockstep.generation.gpu.draw import draw, keep_top
from lockstep.generation.gpu.filters import Filter, note_tokens
from lockstep.generation.gpu.fused import FusedDecoder
from lockstep.generation.gpu.hf_layers import HFDecoder
from lockstep.generation.gpu.rows import TOO_LONG, RowState
from lockstep.generation.gpu.short_prefill import ShortPrefill
from lockstep.observability.spans import progress

BUCKETS = (8, 16, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512, 640, 768, 896, 1024)
"""Batch sizes that are captured; above the last, multiples of 256."""

StepKind = tuple[int, Filter | None, bool, bool, bool]
"""What a graph is captured for: the number of rows, the filter, whether shared prefixes are read together, whether the most likely tokens
are noted, and whether contexts are long."""
WarmSteps = set[StepKind]
"""What has been computed once in this process: its kernels are compiled."""
Decoder = FusedDecoder | HFDecoder


def bucket(rows: int) -> int:
    """The batch size that `rows` rows are computed with."""
    return next((size for size in BUCKETS if size >= rows), -(-rows // 256) * 256)


def buckets(rows: int) -> list[int]:
    """The batch sizes that up to `rows` rows are computed with, the largest first."""
    largest = bucket(rows)
    return sorted({*(size for size in BUCKETS if size < largest), *range(1280, largest, 256), largest}, reverse=True)


class DecodeRunner:
    """Steps over `rows`. On a device without CUDA graphs (tests with Triton's interpreter) each step is simply computed."""

    def __init__(self, decoder: Decoder, rows: RowState, page_size: int, warm: WarmSteps) -> None:
        self._decoder = decoder
        self._rows = rows
        self._page_size = page_size
        self._captures = rows.token.is_cuda
        self._graphs: dict[StepKind, torch.cuda.CUDAGraph] = {}
        self._pool: Any = None
        self._warm = warm
        self.short: ShortPrefill | None = None
        """For prefills of few tokens; None where the decoder has no such step."""
        if not isinstance(decoder, HFDecoder):
            self.short = ShortPrefill(decoder, rows.page_table.shape[1], decoder.block, rows.token.device)

    def steps(self, size: int, count: int, keep: Filter | None, shared: bool, top: bool = False, long: bool = False) -> None:
        """`count` more tokens for the first `size` rows, `size` being one of the buckets. Returns before they are computed."""
        kind = (size, keep, shared, top, long)
        if self._captures and kind not in self._graphs:
            with progress(f"compiling the decode step of {kind[0]} rows"):
                self._capture(kind)
        graph = self._graphs.get(kind)
        for _ in range(count):
            if graph is None:
                self._step(*kind)
            else:
                graph.replay()

    def prepare(self, kinds: Sequence[StepKind]) -> None:
        """Capture the first of these steps that has no graph yet and is compiled: for a moment in which the host would wait."""
        for kind in kinds:
            if self._captures and kind in self._warm and kind not in self._graphs:
                self._capture(kind)
                return

    def draw(self, logits: Tensor, first: int, keep: Filter | None, top: bool = False) -> None:
        """Draw a token for each of the rows `first`... from `logits` [count, vocabulary]."""
        if top:
            keep_top(logits, self._rows, first)
        if keep is not None and keep.penalises:
            note_tokens(self._rows, first, len(logits))
        draw(logits, self._rows, first, keep)

    @torch.no_grad()  # it runs while models are loaded, outside of a generation
    def warm_up(self, kinds: Sequence[StepKind]) -> None:
        """Compile these steps, on rows that are all padding."""
        for kind in kinds:
            if self._captures and kind not in self._warm:
                with progress(f"compiling the decode step of {kind[0]} rows"):
                    self._warm_up(kind)

    def forget(self) -> None:
        """Drop the graphs and the memory they hold."""
        self._graphs.clear()
        self._pool = None
        if self.short is not None:
            self.short.forget()

    def forget_filtered(self) -> None:
        """Drop the graphs that use RowState.seen."""
        self._graphs = {kind: graph for kind, graph in self._graphs.items() if kind[1] is None}
        if not self._graphs:  # memory that no graph has any more cannot be captured into
            self._pool = None

    def _step(self, size: int, keep: Filter | None, shared: bool, top: bool, long: bool) -> None:
        rows = self._rows
        table = rows.page_table[:size]
        context = rows.context[:size]
        positions, slots = decode_slots(table, context, self._page_size)
        prefixes = rows.shared_of(size) if shared else None
        self.draw(self._decoder.decode(rows.token[:size], positions, slots, table, context, prefixes, long), 0, keep, top)

    def _capture(self, kind: StepKind) -> None:
        """Add the kind's graph. A model whose step cannot be captured is decoded without graphs from here on, and says so."""
        if not self._warm:
            # A compiler that makes one kernel for all batch sizes tunes it for the size that it sees first: let that be the largest.
            self._warm_up((self._rows.capacity, None, False, False, False))
        if kind not in self._warm:
            self._warm_up(kind)
        graph = torch.cuda.CUDAGraph()
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        try:
            # As `torch.cuda.graph` does it, without waiting for the device first: nothing that is captured is computed now.
            with torch.cuda.stream(_capture_stream()):
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    self._step(*kind)
                finally:
                    graph.capture_end()
        except RuntimeError as error:
            first = str(error).strip().splitlines()[0]
            print(f"decoding without CUDA graphs, which is slower: the step of this model cannot be captured ({first})", flush=True)
            self._captures = False
            self.forget()
            _end_broken_capture()
            return
        self._graphs[kind] = graph

    def _warm_up(self, kind: StepKind) -> None:
        """Compile kernels and make the libraries' workspaces, which must not happen inside a capture.

        Rows that are finished do not advance, and what this run writes to the pages is what the next step writes there again.
        """
        size = kind[0]
        done = self._rows.done[:size].clone()
        self._rows.done[:size] = TOO_LONG
        self._step(*kind)
        self._rows.done[:size] = done
        self._warm.add(kind)


def _capture_stream() -> Any:
    """The one that `torch.cuda.graph` captures on: the libraries keep memory for each stream that they have seen."""
    if torch.cuda.graph.default_capture_stream is None:
        torch.cuda.graph.default_capture_stream = torch.cuda.Stream()
    return torch.cuda.graph.default_capture_stream


def _end_broken_capture() -> None:
    """A capture that breaks off leaves the device's random generator waiting for its end, and every later draw in this process fails;
    the end of another capture is as good."""
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        torch.zeros(1, device="cuda")
