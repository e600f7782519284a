"""Ragged: a column with a vector of any length in each row, stored without padding."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class Ragged:
    """One vector per row, stored end to end: `values` [total] and `lengths` [rows] (int64, on the CPU)."""

    __slots__ = ("lengths", "values")

    def __init__(self, values: Tensor, lengths: Tensor) -> None:
        if values.dim() != 1 or lengths.dim() != 1:
            raise ValueError(f"Ragged takes flat values and lengths, got shapes {tuple(values.shape)}, {tuple(lengths.shape)}")
        if int(lengths.sum()) != values.shape[0]:
            raise ValueError(f"Ragged lengths add up to {int(lengths.sum())}, but there are {values.shape[0]} values")
        self.values = values
        self.lengths = lengths.to("cpu", torch.int64)

    @classmethod
    def from_rows(cls, rows: Sequence[Tensor | Sequence[float]], dtype: torch.dtype | None = None) -> Ragged:
        """Join one vector per row. `dtype` decides the type when every row is empty."""
        tensors = [torch.as_tensor(row, dtype=dtype).reshape(-1) for row in rows]
        lengths = torch.tensor([len(t) for t in tensors], dtype=torch.int64)
        # An empty list is float32 to torch, and would turn the ids of the other rows into floats.
        filled = [t for t in tensors if len(t)] or tensors
        values = torch.cat(filled) if filled else torch.empty(0, dtype=dtype)
        return cls(values, lengths)

    @classmethod
    def from_padded(cls, padded: Tensor, lengths: Tensor, side: str = "right") -> Ragged:
        """Take the first (side "right") or last (side "left") `lengths[i]` entries of each row of `padded` [rows, width]."""
        return cls(padded[padding_mask(lengths, padded.shape[1], side).to(padded.device)], lengths)

    def pad(self, value: float = 0, side: str = "right", width: int | None = None) -> Tensor:
        """The column as [rows, width], filled with `value` on the given side; width is the longest row unless given."""
        width = self.width if width is None else width
        if width < self.width:
            raise ValueError(f"width {width} is smaller than the longest row, {self.width}")
        out = torch.full((len(self) * width,), value, dtype=self.values.dtype, device=self.values.device)
        places = padding_mask(self.lengths, width, side).flatten().nonzero().flatten()
        # (A boolean index on a GPU, like a copy to it that blocks, would wait for all that was asked of it before.)
        return out.index_copy(0, places.to(out.device, non_blocking=True), self.values).view(len(self), width)

    @property
    def width(self) -> int:
        """The longest row."""
        return int(self.lengths.max()) if len(self) else 0

    def rows(self) -> tuple[Tensor, ...]:
        """One view per row."""
        return torch.split(self.values, self.lengths.tolist())

    def like(self, values: Tensor) -> Ragged:
        """Other values on the same lengths."""
        return Ragged(values, self.lengths)

    def select(self, positions: Tensor) -> Ragged:
        """The rows at `positions` (int64), in that order; a row may appear more than once."""
        starts = torch.cumsum(self.lengths, 0) - self.lengths
        lengths = self.lengths[positions]
        first = torch.repeat_interleave(starts[positions] - (torch.cumsum(lengths, 0) - lengths), lengths)
        index = torch.arange(int(lengths.sum())) + first
        return Ragged(self.values[index.to(self.values.device)], lengths)

    @staticmethod
    def cat(columns: Sequence[Ragged]) -> Ragged:
        """The rows of all columns, one after the other."""
        return Ragged(torch.cat([c.values for c in columns]), torch.cat([c.lengths for c in columns]))

    def to(self, device: torch.device | str) -> Ragged:
        """The values on another device; lengths stay on the CPU."""
        # From pageable memory, which is what these are in, a copy that does not block has read its source when it returns.
        return Ragged(self.values.to(device, non_blocking=self.values.device.type == "cpu"), self.lengths)

    def equal(self, other: Ragged) -> bool:
        """Same lengths and same values, bit for bit (NaN equals NaN)."""
        return torch.equal(self.lengths, other.lengths) and tensors_equal(self.values, other.values)

    def __len__(self) -> int:
        return self.lengths.shape[0]

    def __getitem__(self, row: int) -> Tensor:
        row = range(len(self))[row]
        start = int(self.lengths[:row].sum())
        return self.values[start : start + int(self.lengths[row])]

    def __repr__(self) -> str:
        return f"Ragged(rows={len(self)}, total={self.values.shape[0]}, dtype={self.values.dtype})"


def padding_mask(lengths: Tensor, width: int, side: str) -> Tensor:
    """bool [rows, width]: where a column of these lengths has its values when it is padded on that side."""
    if side not in ("left", "right"):
        raise ValueError(f"side must be 'left' or 'right', not {side!r}")
    positions = torch.arange(width)
    lengths = lengths.cpu()
    return positions < lengths[:, None] if side == "right" else positions >= width - lengths[:, None]


def tensors_equal(a: Tensor, b: Tensor) -> bool:
    """Same shape, type and values, bit for bit (NaN equals NaN)."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return bool(((a == b) | ((a != a) & (b != b))).all()) if a.is_floating_point() else torch.equal(a, b)
