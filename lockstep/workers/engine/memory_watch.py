"""The memory of a stage of a step on one device: its peak, and what to do when it was not enough."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from lockstep.errors import OutOfMemory
from lockstep.models.packing import Budget
from lockstep.observability.metrics import Max, Metric

_GIB = 2**30

_peaks: dict[torch.device, dict[str, Metric]] = {}
"""Peaks of this process that nobody has taken. All its workers share them: some (a reference, a reward model) return no metrics."""


class MemoryWatch:
    """Watches the stages of a step on `device`, and remembers the peaks of GPU memory until a worker of this process takes them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @contextmanager
    def stage(self, name: str, token_counts: Sequence[int], budget: Budget | None, key: str) -> Iterator[None]:
        """A stage over rows of these token counts, cut by `budget`; `key` is the config key that lowers its memory first.

        Raises OutOfMemory, with the stage, the sizes and the key, in the place of an out-of-memory error.
        """
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        try:
            yield
        except RuntimeError as error:
            if not _is_out_of_memory(error):
                raise
            raise OutOfMemory(_advice(name, token_counts, budget, key, str(error))) from error
        if self._device.type == "cuda":
            peaks = _peaks.setdefault(self._device, {})
            for kind, peak in (("allocated", torch.cuda.max_memory_allocated), ("reserved", torch.cuda.max_memory_reserved)):
                metric, own = f"perf/max_memory_{kind}_gb/{name}", Max(peak(self._device) / _GIB)
                peaks[metric] = own.merge(peaks.get(metric, own))

    def take_peaks(self) -> dict[str, Metric]:
        """perf/max_memory_{allocated,reserved}_gb/NAME of every stage of this process since the last call. Empty on a CPU."""
        return _peaks.pop(self._device, {})


def _is_out_of_memory(error: RuntimeError) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def _advice(name: str, token_counts: Sequence[int], budget: Budget | None, key: str, error: str) -> str:
    sizes = f"{len(token_counts)} rows of {sum(token_counts)} tokens, the longest {max(token_counts, default=0)}"
    cut = ""
    if budget is not None:
        cut = f", up to {budget.max_tokens} tokens at once" if budget.max_rows is None else f", {budget.max_rows} rows at once"
    first = error.strip().splitlines()[0]
    return f"out of memory in stage {name} ({sizes}{cut}): {first}. Lower {key} first; it never changes a result"
