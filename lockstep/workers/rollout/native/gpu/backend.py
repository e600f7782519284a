"""GPUBackend: what the native engine asks of a CUDA device: memory for pages, and a scheduler's sequences run to their ends."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from transformers import PreTrainedModel

from lockstep.config.sampling import SamplingParams
from lockstep.workers.rollout.native.gpu.draw import num_chunks
from lockstep.workers.rollout.native.gpu.filters import make_filter
from lockstep.workers.rollout.native.gpu.fused import FusedDecoder, fuse_projections, is_fusable
from lockstep.workers.rollout.native.gpu.hf_layers import HFDecoder
from lockstep.workers.rollout.native.gpu.loop import FindStop, GenerationLoop
from lockstep.workers.rollout.native.gpu.rows import RowState
from lockstep.workers.rollout.native.gpu.runner import Decoder, DecodeRunner, bucket
from lockstep.workers.rollout.native.layout import CacheShape, KVCache
from lockstep.workers.rollout.native.scheduler import Scheduler, Sequence

PAGE_SIZE = 64
INTERVAL = 8
"""Decode steps between two looks of the host: long enough to hide its work, short enough that a stopped row does not idle for long."""


class GPUBackend:
    """Decodes `module` on its device. `open` takes memory, `close` gives all of it back.

    `own_weights` says that the module's parameters are nobody else's, so that they may be laid out anew (see `fuse_projections`).
    """

    page_size, lookahead, mixed = PAGE_SIZE, INTERVAL, False

    def __init__(self, module: PreTrainedModel, shape: CacheShape, *, own_weights: bool, fused: bool = True) -> None:
        self._module, self._shape, self._own_weights = module, shape, own_weights
        self._fused = fused and is_fusable(module)
        self._device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
        self._cache: KVCache | None = None
        self._rows: RowState | None = None
        self._decoder: Decoder | None = None
        self._runner: DecodeRunner | None = None
        self._addresses: list[int] = []

    @property
    def num_pages(self) -> int:
        """Pages that are there now, the scratch page among them; 0 while closed."""
        return 0 if self._cache is None else self._cache.num_pages

    def open(self, num_pages: int, max_num_seqs: int, max_tokens: int) -> None:
        """Take memory for `num_pages` pages and `max_num_seqs` sequences of up to `max_tokens` tokens."""
        self.close()
        self._cache = KVCache(self._shape, num_pages, self._device)
        vocabulary = self._module.config.get_text_config().vocab_size
        width = -(-max_tokens // self.page_size) + 1
        self._rows = RowState.make(bucket(max_num_seqs), width, vocabulary, num_chunks(vocabulary), self._device)
        if self._fused:
            if self._own_weights:
                fuse_projections(self._module)
            self._decoder = FusedDecoder(self._module, self._cache, width * self.page_size)
        else:
            self._decoder = HFDecoder(self._module, self._cache, compile_layers=self._device.type == "cuda")
        self._runner = DecodeRunner(self._decoder, self._rows, self.page_size)

    def close(self) -> None:
        """Give the memory of pages, rows and graphs back to the device."""
        if self._runner is not None:
            self._runner.forget()
        self._cache = self._rows = self._decoder = self._runner = None
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def run(
        self, scheduler: Scheduler, keys: Mapping[int, int], sampling: SamplingParams, stop_token_ids: frozenset[int], find_stop: FindStop
    ) -> Iterator[tuple[Sequence, bool]]:
        """See GenerationLoop.run. `stop_token_ids` are those that end every sequence: the device looks for them itself."""
        assert self._cache is not None and self._rows is not None and self._decoder is not None and self._runner is not None
        addresses = [parameter.data_ptr() for parameter in self._module.parameters()]
        if addresses != self._addresses:
            self._runner.forget()
            self._addresses = addresses
        rows = self._rows
        rows.inverse_temperature.fill_(1.0 / (sampling.temperature or 1.0))
        rows.greedy.fill_(int(sampling.temperature == 0))
        rows.stop.zero_()
        if stop_token_ids:
            rows.stop[torch.tensor(sorted(stop_token_ids), device=self._device)] = 1
        loop = GenerationLoop(scheduler, self._decoder, self._runner, rows, self._cache)
        yield from loop.run(keys, find_stop, make_filter(sampling))
