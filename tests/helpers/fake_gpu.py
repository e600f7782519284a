"""The GPU's generation loop on a machine without a GPU or Triton: plain functions instead of kernels, a fake model instead of a decoder.

Everything that the host does is the real code: `GPUBackend`, `GenerationLoop`, `RowState`, `DecodeRunner`, the filters.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel  # noqa: F401  (before the stub: what it imports asks Triton more than the stub knows)

from helpers.fake_model import EMPTY, VOCABULARY, FakeModel
from lockstep.generation.pages import CacheShape
from lockstep.workers.rollout.sampling import keep_likely, uniforms

__all__ = ["FakeDecoder", "fake_gpu", "loop", "make_gpu", "rows", "short_prefill"]


_TRITON = (
    "triton", "triton.language", "triton.language.extra", "triton.language.extra.cuda", "triton.tools", "triton.tools.tensor_descriptor",
)  # fmt: skip


class _NoKernel:
    """What `triton.jit` makes of a function here: it can be imported and not called."""

    def __getitem__(self, grid: Any) -> Any:
        raise AssertionError("a Triton kernel was called without Triton")


@contextmanager
def _stub_triton() -> Iterator[None]:
    """Inside, modules that import Triton can be imported where it is not installed."""
    if find_spec("triton") is not None:
        yield
        return
    triton, language, extra, cuda, tools, descriptors = (ModuleType(name) for name in _TRITON)
    triton.jit = lambda function=None, **options: _NoKernel() if function else lambda function: _NoKernel()  # type: ignore[attr-defined]
    triton.cdiv = lambda a, b: -(-a // b)  # type: ignore[attr-defined]
    triton.next_power_of_2 = lambda n: 1 << (n - 1).bit_length()  # type: ignore[attr-defined]
    triton.language, language.constexpr = language, int  # type: ignore[attr-defined]
    cuda.gdc_wait = cuda.gdc_launch_dependents = _NoKernel()  # type: ignore[attr-defined]
    descriptors.TensorDescriptor = _NoKernel()  # type: ignore[attr-defined]
    sys.modules |= dict(zip(_TRITON, (triton, language, extra, cuda, tools, descriptors), strict=True))
    try:
        yield
    finally:
        for name in _TRITON:
            del sys.modules[name]


with _stub_triton():
    from lockstep.generation.gpu import backend, loop, rows, runner, short_prefill
    from lockstep.generation.gpu.attention import SharedPrefixes
    from lockstep.generation.gpu.filters import Filter
    from lockstep.generation.gpu.rows import NOT_FINITE, RING, RUNNING, STOPPED, TOO_LONG, RowState


class FakeDecoder:
    """See Decoder: the logits of a FakeModel, whose memory stands for the pages.

    The scale of a token, where `scales` [pages, kv_heads, page_size, 2] are kept, is the token; who reads a token without it is wrong.
    """

    def __init__(self, model: FakeModel, num_heads: int, scales: Tensor | None = None) -> None:
        self._model, self.num_heads, self.block, self._scales = model, num_heads, 4, scales

    def _logits(
        self, tokens: list[int], positions: list[int], slots: list[int], table: list[list[int]], wanted: Sequence[int]
    ) -> Tensor:
        size, scales = self._model.page_size, self._scales
        if scales is not None:
            for token, slot in zip(tokens, slots, strict=True):
                scales[slot // size, :, slot % size] = token
        logits = self._model.logits(tokens, positions, slots, table, wanted)
        if scales is not None:
            kept = scales[:, -1, :, -1].int().tolist()
            for i in wanted:
                row = self._model.row(table[i], positions[i])
                found = [scale for page in [*table[i], 0][: positions[i] // size + 1] for scale in kept[page]]
                wrong = [at for at, (token, scale) in enumerate(zip(row, found, strict=False)) if token not in (EMPTY, scale)]
                assert not wrong, f"scales of others at {wrong}"
        return logits

    def decode(
        self,
        tokens: Tensor,
        positions: Tensor,
        slots: Tensor,
        page_table: Tensor,
        context_lens: Tensor,
        shared: SharedPrefixes | None,
        long: bool = False,
    ) -> Tensor:
        table = page_table.tolist()
        if shared is not None:  # the first pages of a group are read through its first row
            for first, size in zip(shared.first.tolist(), shared.size.tolist(), strict=True):
                pages = int(shared.tokens[first]) // self._model.page_size if size else 0
                for row in range(first, first + size):
                    table[row][:pages] = table[first][:pages]
        return self._logits(tokens.tolist(), positions.tolist(), slots.tolist(), table, range(len(table)))

    def hidden(self, tokens: Tensor, positions: Tensor, slots: Tensor, page_table: Tensor, context_lens: Tensor) -> Tensor:
        assert context_lens.tolist() == positions.tolist()
        own = page_table.repeat_interleave(len(tokens) // len(page_table), 0)
        return self.decode(tokens, positions, slots, own, context_lens, None)

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden

    def prefill(self, tokens: Tensor, positions: Tensor, slots: Tensor, rows: Any) -> Tensor:
        size, table = self._model.page_size, []
        key_slots = slots if rows.key_slots is None else rows.key_slots
        for count, own in zip(rows.lengths, key_slots.split(rows.ends), strict=True):
            pages = [slot // size for slot in own.tolist()[::size]]
            table += [pages] * count
        return self._logits(tokens.tolist(), positions.tolist(), slots.tolist(), table, rows.wanted.tolist())

    def release(self) -> None:
        pass


def penalised(scaled: Tensor, rows: RowState, row: int) -> Tensor:
    """gpu/filters.py's penalties in plain PyTorch."""
    assert rows.seen is not None
    assert rows.counts is not None
    here, counts = slice(row, row + 1), rows.counts[row]
    repetition, presence, frequency, inverse = (
        rows.option(name, here)[0]
        for name in ("repetition_penalty", "presence_penalty", "frequency_penalty", "inverse_temperature")
    )
    scaled = torch.where(rows.seen[row], torch.where(scaled > 0, scaled / repetition, scaled * repetition), scaled)
    return scaled - (presence * (counts > 0) + frequency * counts) * inverse


def draw(logits: Tensor, rows: RowState, first: int, kind: Filter | None = None) -> None:
    """gpu/draw.py in plain PyTorch, row by row."""
    for line in range(len(logits)):
        row = first + line
        if rows.done[row] != RUNNING:
            continue
        scaled = source = logits[line] * rows.inverse_temperature[row]
        if kind is not None and kind.penalises:
            source = penalised(scaled, rows, row)
        if kind is not None and kind.truncates:
            options = (rows.option(name, slice(row, row + 1)) for name in ("top_k", "top_p", "min_p"))
            source = keep_likely(source[None], *options)[0]
        place = rows.generated[row : row + 1].long()
        number = place + rows.position[row]
        ends = source.double().softmax(-1).cumsum(-1)
        token = int(torch.searchsorted(ends, uniforms(rows.key[row : row + 1], number).double() * ends[-1], right=True))
        token = int(source.argmax()) if rows.greedy[row] else min(token, len(source) - 1)
        log_prob = scaled[token] - scaled.logsumexp(-1)
        rows.out_tokens[row, place % RING], rows.out_log_probs[row, place % RING] = token, log_prob
        rows.token[row] = token
        rows.context[row] += 1
        rows.generated[row] += 1
        state = TOO_LONG if rows.generated[row] >= rows.limit[row] else RUNNING
        rows.done[row] = NOT_FINITE if not torch.isfinite(log_prob) else STOPPED if rows.stop[token] and rows.stops[row] else state


def decode_slots(page_table: Tensor, context_lens: Tensor, page_size: int) -> tuple[Tensor, Tensor]:
    """gpu/attention.py's in plain PyTorch."""
    positions = context_lens.long()
    pages = page_table.gather(1, (positions // page_size)[:, None])[:, 0].long()
    return positions, pages * page_size + positions % page_size


@pytest.fixture
def make_gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """`make_gpu(model, ...)`: a GPUBackend on the CPU over a FakeModel; 64 heads share prefixes."""
    return lambda *args, **options: fake_gpu(monkeypatch, *args, **options)


def fake_gpu(
    patch: pytest.MonkeyPatch,
    model: FakeModel,
    lookahead: int = 8,
    batch_invariant: bool = False,
    kv_heads: int = 1,
    kept: str = "auto",
) -> Any:
    """See `make_gpu`."""

    def copy_pages(pool: Tensor, sources: Tensor, targets: Tensor) -> None:
        if pool.dtype in (torch.bfloat16, torch.int16):  # scales
            pool[:, :, targets] = pool[:, :, sources]
        else:
            model.copy(dict(zip(targets.tolist(), sources.tolist(), strict=True)))

    patch.setattr(backend, "HFDecoder", lambda module, cache, compile_layers: FakeDecoder(model, kv_heads))
    patch.setattr(backend, "FusedDecoder", lambda module, cache, longest: FakeDecoder(model, kv_heads, cache.scales[0]))
    patch.setattr(backend, "is_fusable", lambda config, mixtures: kept != "auto")
    patch.setattr(runner, "draw", draw)
    patch.setattr(runner, "decode_slots", decode_slots)
    patch.setattr(loop, "copy_pages", copy_pages)

    class SmallPages(backend.GPUBackend):
        page_size = model.page_size

    SmallPages.lookahead = lookahead
    text = SimpleNamespace(vocab_size=VOCABULARY)
    module: Any = SimpleNamespace(device=torch.device("cpu"), config=SimpleNamespace(get_text_config=lambda: text), modules=list)
    shape = CacheShape(1, kv_heads, 1, model.page_size, torch.float32, kept)
    made = SmallPages(module, shape, 0.5, own_weights=False, batch_invariant=batch_invariant)
    made.open(model.num_pages)
    return made
