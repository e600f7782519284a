"""Which flash attention the segments of a packed sequence go through on a GPU: the fastest at their length.

Legend: N tokens, H query heads, K key-value heads, D head size.
"""

from dataclasses import dataclass, field

from torch import Tensor

from lockstep.kernels import flash, long_rows
from lockstep.kernels.segment_attention import Segments
from lockstep.kernels.segment_attention import attend as attend_segments
from lockstep.models.attention import PackedLayout

SEGMENT_SIZES = (64, 128)
"""Head sizes of segment_attention.py."""


@dataclass
class Kept:
    """What the layers of a model would otherwise make again for the same layout."""

    segments: Segments
    runs: dict[int, list[flash.Run]] = field(default_factory=dict)
    """By the length from which segments go alone."""

    @classmethod
    def of(cls, layout: PackedLayout) -> "Kept":
        """Those of a layout, made at most once."""
        if layout.flash is None:
            followers = [layout.continued.count(number) for number in range(layout.num_shared)]
            layout.flash = cls(Segments(layout.lengths.tolist(), followers, layout.device))
        kept: Kept = layout.flash
        return kept


def attend(query: Tensor, key: Tensor, value: Tensor, layout: PackedLayout, scale: float | None, window: int | None) -> Tensor:
    """[N, H, D] from query [N, H, D], key and value [N, K, D]; a `window` goes without shared segments only."""
    size, kept, least = query.shape[-1], Kept.of(layout), layout.num_tokens + 1
    if window is None and long_rows.applies(query):
        least = long_rows.LEAST[size]
    if window is None and size in SEGMENT_SIZES and layout.own.longest_query < least:
        return attend_segments(query, key, value, kept.segments, scale)
    if least not in kept.runs:
        kept.runs[least] = flash.cut_runs(layout.lengths.tolist(), layout.device, least - 1)
    return flash.attend(query, key, value, kept.runs[least], layout.shared, layout.num_shared_tokens, scale, window)
