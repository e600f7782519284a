"""What others' code expects of a batch and a step does not need: padded tensors, and numbers of rows that divide evenly."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lockstep.ragged import Ragged, padding_mask

if TYPE_CHECKING:
    from lockstep.protocol import DataProto

DERIVED = ("input_ids", "attention_mask", "position_ids")
TOKEN_COLUMNS = ("prompts", "responses")


class BatchView(Mapping[str, Tensor]):
    """The tensors of a DataProto as padded tensors: prompts padded on the left, everything else on the right.

    Reading pads a ragged column (ids with `meta_info["pad_token_id"]`, numbers with 0) and derives `input_ids`, `attention_mask` and
    `position_ids` from prompts and responses where both are ragged. Writing a tensor of the responses' padded shape (for "prompts": of
    the prompts') stores it ragged, without the padding; any other tensor is stored as it is.
    """

    def __init__(self, data: DataProto) -> None:
        self._data = data

    def __getitem__(self, name: str) -> Tensor:
        data = self._data
        if name in data.columns:
            column = data.columns[name]
            if isinstance(column, Tensor):
                return column
            pad = data.meta_info.get("pad_token_id", 0) if name in TOKEN_COLUMNS else 0
            return column.pad(pad, side=_side(name))
        if name in self:
            return self._derive(name)
        raise KeyError(f"no tensor column {name!r}; there are {sorted(self)}")

    def _derive(self, name: str) -> Tensor:
        if name == "input_ids":
            return torch.cat([self["prompts"], self["responses"]], dim=1)
        prompts, responses = self._data.ragged("prompts"), self._data.ragged("responses")
        masks = [padding_mask(column.lengths, column.width, side) for column, side in ((prompts, "left"), (responses, "right"))]
        attention_mask = torch.cat(masks, dim=1).long().to(responses.values.device)
        return attention_mask if name == "attention_mask" else (attention_mask.cumsum(1) - 1).clamp(min=0)

    def __setitem__(self, name: str, value: Tensor | Ragged) -> None:
        shaped = self._data.columns.get("prompts" if name == "prompts" else "responses")
        if isinstance(value, Tensor) and isinstance(shaped, Ragged) and tuple(value.shape) == (len(shaped), shaped.width):
            value = Ragged.from_padded(value, shaped.lengths, _side(name))
        self._data.set(name, value)

    def __iter__(self) -> Iterator[str]:
        columns = self._data.columns
        yield from columns
        if self._data.has_token_rows():
            yield from (name for name in DERIVED if name not in columns)

    def __contains__(self, name: object) -> bool:
        # Mapping's own asks __getitem__, which would pad the column.
        return any(name == other for other in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)


def pad_dataproto_to_divisor(data: DataProto, size_divisor: int) -> tuple[DataProto, int]:
    """Repeat rows from the start until the number of rows is a multiple of `size_divisor`; also returns how many were added."""
    pad_size = -len(data) % size_divisor
    if pad_size and not len(data):
        raise ValueError("an empty batch cannot be padded")
    rows = torch.arange(len(data) + pad_size) % max(len(data), 1)
    return (data.select_idxs(rows) if pad_size else data), pad_size


def unpad_dataproto(data: DataProto, pad_size: int) -> DataProto:
    """Drop the last `pad_size` rows."""
    return data.slice(0, len(data) - pad_size) if pad_size else data


def _side(name: str) -> str:
    """Where a column is padded."""
    return "left" if name == "prompts" else "right"
