"""What others' code expects of a batch and a step does not need: padded tensors, and numbers of rows that divide evenly."""

from __future__ import annotations

import errno
import itertools
from collections.abc import Callable, Iterator, KeysView, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from torch import Tensor

from lockstep.ragged import Ragged, padding_mask

if TYPE_CHECKING:
    from lockstep.protocol import DataProto, Indices

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
        """The number of rows, as a TensorDict says it."""
        return len(self._data)

    def keys(self) -> KeysView[str]:
        """The names of the columns, those that are derived included."""
        return dict.fromkeys(self).keys()

    @property
    def batch_size(self) -> torch.Size:
        """The number of rows, as a TensorDict says it."""
        return torch.Size([len(self._data)])

    def pop(self, name: str) -> Tensor:
        """The column, padded, which leaves the batch."""
        column = self[name]
        del self._data.columns[name]
        return column


@dataclass
class DataProtoItem:
    """One row, as `data[i]` gives it: `batch` maps names to views of this row's tensors, without padding."""

    batch: dict[str, Tensor]
    non_tensor_batch: dict[str, Any]
    meta_info: dict[str, Any]


class ForOthers:
    """What others' code calls on a batch and a step does not: the base of DataProto."""

    columns: dict[str, Any]
    non_tensor_batch: dict[str, np.ndarray]
    meta_info: dict[str, Any]

    if TYPE_CHECKING:

        def __init__(self, *args: Any, **kwargs: Any) -> None: ...
        def __len__(self) -> int: ...
        def has_token_rows(self) -> bool: ...
        def select_idxs(self, indices: Any) -> Self: ...
        @classmethod
        def from_dict(cls, *args: Any, **kwargs: Any) -> Self: ...

    def padding(self, padding_size: int, padding_candidate: str = "first") -> None:
        """Add the first or the last row `padding_size` times at the end, in place."""
        if padding_size:
            row = {"first": 0, "last": len(self) - 1}[padding_candidate]
            longer = self.select_idxs(torch.cat([torch.arange(len(self)), torch.full((padding_size,), row)]))
            self.columns, self.non_tensor_batch = longer.columns, longer.non_tensor_batch

    def fold_batch_dim(self, new_batch_size: int) -> Any:
        """See the function of this name."""
        return fold_batch_dim(self, new_batch_size)  # type: ignore[arg-type]

    def unfold_batch_dim(self, batch_dims: int = 2) -> Any:
        """See the function of this name."""
        return unfold_batch_dim(self, batch_dims)  # type: ignore[arg-type]

    def to_tensordict(self) -> Any:
        """See the function of this name."""
        return to_tensordict(self)  # type: ignore[arg-type]

    @classmethod
    def from_single_dict(
        cls, data: Mapping[str, Any], meta_info: Mapping[str, Any] | None = None, auto_padding: bool = False
    ) -> Self:
        """Sort a mixed dict into tensor and object columns. Raises for a value that is neither tensor, Ragged, array nor list."""
        tensors, objects = {}, {}
        for name, value in data.items():
            if isinstance(value, Tensor | Ragged):
                tensors[name] = value
            elif isinstance(value, np.ndarray | list):
                objects[name] = value
            else:
                raise ValueError(f"column {name!r} must be a tensor, a Ragged, an array or a list, not {type(value).__name__}")
        return cls.from_dict(tensors, objects, meta_info)

    def __getitem__(self, item: int | Indices) -> Any:
        """A DataProtoItem for a number, a DataProto for a slice, a list, an array or a mask."""
        if isinstance(item, int | np.integer):
            row = range(len(self))[item]
            tensors = {name: column[row] for name, column in self.columns.items()}
            if self.has_token_rows():
                ids = torch.cat([tensors[name] for name in TOKEN_COLUMNS])
                derived = (ids, torch.ones_like(ids), torch.arange(len(ids), device=ids.device))
                tensors = dict(zip(DERIVED, derived, strict=True)) | tensors
            return DataProtoItem(tensors, {k: v[row] for k, v in self.non_tensor_batch.items()}, self.meta_info)
        return self.select_idxs(item)

    def pop(
        self, batch_keys: Sequence[str] = (), non_tensor_batch_keys: Sequence[str] = (), meta_info_keys: Sequence[str] | None = None
    ) -> Self:
        """Remove columns, in place, and return them; one that is derived goes with those that it is derived of. With `meta_info_keys` these
        of meta_info too, else with a copy of all of it."""
        stored = [k for k in batch_keys if k in self.columns or k not in DERIVED or not self.has_token_rows()]
        tensors = {k: self.columns.pop(k) for k in stored}
        objects = {k: self.non_tensor_batch.pop(k) for k in non_tensor_batch_keys}
        meta = dict(self.meta_info) if meta_info_keys is None else {k: self.meta_info.pop(k) for k in meta_info_keys}
        return type(self)(tensors, objects, meta)

    def slice(self, start: int | None = None, end: int | None = None, step: int | None = None) -> Self:
        """Rows start:end:step."""
        return self.select_idxs(slice(start, end, step))

    def reorder(self, indices: Tensor) -> None:
        """Put the rows in this order, in place."""
        ordered = self.select_idxs(indices)
        self.columns, self.non_tensor_batch = ordered.columns, ordered.non_tensor_batch

    def sample_level_repeat(self, repeat_times: Sequence[int]) -> Self:
        """Row i `repeat_times[i]` times."""
        return self.select_idxs(torch.arange(len(self)).repeat_interleave(torch.as_tensor(repeat_times, dtype=torch.int64)))

    def chunk(self, chunks: int) -> list[Self]:
        """`chunks` runs of neighbouring rows whose sizes differ by at most one; some are empty when there are too few rows."""
        bounds = [len(self) * i // chunks for i in range(chunks + 1)]
        return [self.slice(a, b) for a, b in itertools.pairwise(bounds)]

    def split(self, split_size: int) -> list[Self]:
        """Runs of `split_size` rows; the last may be shorter."""
        return [self.slice(i, i + split_size) for i in range(0, len(self), split_size)]

    def make_iterator(self, mini_batch_size: int, epochs: int, seed: int | None = None) -> Iterator[Self]:
        """Mini-batches of that many rows, `epochs` times over; each epoch in a new order when `seed` is given."""
        if len(self) % mini_batch_size:
            raise ValueError(f"{len(self)} rows cannot be cut into mini-batches of {mini_batch_size}")
        generator = torch.Generator().manual_seed(seed) if seed is not None else None
        for _ in range(epochs):
            order = torch.randperm(len(self), generator=generator) if generator else torch.arange(len(self))
            for rows in order.split(mini_batch_size):
                yield self.select_idxs(rows)

    def to(self, device: torch.device | str) -> Self:
        """Tensor columns on another device."""
        return type(self)({k: c.to(device) for k, c in self.columns.items()}, dict(self.non_tensor_batch), dict(self.meta_info))

    def save_to_disk(self, path: str | Path) -> None:
        """Write the batch to one file. Raises OSError."""
        Path(path).open("wb").close()  # a path that cannot be written to says so itself
        try:
            torch.save((self.columns, self.non_tensor_batch, self.meta_info), path)
        except RuntimeError as error:  # what torch makes of a disk that is full
            raise OSError(errno.ENOSPC, f"not written whole ({str(error).splitlines()[0]})", str(path)) from error

    @classmethod
    def load_from_disk(cls, path: str | Path) -> Self:
        """Read what `save_to_disk` wrote. The file is unpickled: read only files you trust."""
        return cls(*torch.load(path, weights_only=False))

    @classmethod
    def from_tensordict(cls, tensordict: Any, meta_info: Mapping[str, Any] | None = None) -> Self:
        """What `to_tensordict` made: tensors are columns, lists are object columns, and everything else is `meta_info`."""
        return cls(*from_tensordict(tensordict, meta_info))


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


def fold_batch_dim(data: DataProto, new_batch_size: int) -> DataProto:
    """Runs of neighbouring rows as one row each: dense columns become [new_batch_size, rows per run, ...], object entries arrays."""
    if len(data) % new_batch_size:
        raise ValueError(f"{len(data)} rows cannot be folded into {new_batch_size}")
    run = len(data) // new_batch_size
    blocks = {name: data.batch[name] for name in data.columns}
    tensors: dict[str, Tensor | Ragged] = {name: x.reshape(new_batch_size, run, *x.shape[1:]) for name, x in blocks.items()}
    objects = {
        name: [values[i * run : (i + 1) * run] for i in range(new_batch_size)] for name, values in data.non_tensor_batch.items()
    }
    return type(data)(tensors, objects, dict(data.meta_info))


def unfold_batch_dim(data: DataProto, batch_dims: int = 2) -> DataProto:
    """What `fold_batch_dim` folded, with the first `batch_dims` dimensions as rows again."""
    tensors: dict[str, Tensor | Ragged] = {name: data.batch[name].flatten(0, batch_dims - 1) for name in data.columns}
    objects = {name: [entry for run in values for entry in run] for name, values in data.non_tensor_batch.items()}
    return type(data)(tensors, objects, dict(data.meta_info))


def merge_meta(parts: Sequence[Mapping[str, Any]], equal: Callable[[Any, Any], bool]) -> dict[str, Any]:
    """The entries of all parts; "metrics", a dict or a list of dicts, as lists by name. Raises ValueError where parts differ."""
    merged: dict[str, Any] = {}
    metrics: dict[str, list[Any]] = {}
    for part in parts:
        for key, value in part.items():
            if key == "metrics":
                for entry in value if isinstance(value, list) else [value]:
                    for name, number in entry.items():
                        metrics.setdefault(name, []).extend(number if isinstance(number, list) else [number])
            elif not equal(merged.setdefault(key, value), value):
                raise ValueError(f"Conflicting values for meta_info key {key!r}: {merged[key]!r} and {value!r}")
    return merged | ({"metrics": metrics} if metrics else {})


def to_tensordict(data: DataProto) -> Any:
    """A TensorDict with every tensor column padded, object columns as lists, and meta_info. Raises ImportError without tensordict."""
    from tensordict import NonTensorData, NonTensorStack, TensorDict

    columns: dict[str, Any] = {name: data.batch[name] for name in data.columns}
    columns |= {name: NonTensorStack(*map(NonTensorData, values)) for name, values in data.non_tensor_batch.items()}
    made = TensorDict(columns, batch_size=[len(data)])
    for name, value in data.meta_info.items():
        made.set_non_tensor(name, value)
    return made


def from_tensordict(
    tensordict: Any, meta_info: Mapping[str, Any] | None
) -> tuple[dict[str, Tensor | Ragged], dict[str, Any], dict[str, Any]]:
    """Tensors, object columns and meta_info of a TensorDict."""
    tensors: dict[str, Tensor | Ragged] = {}
    objects, meta = {}, dict(meta_info or {})
    for name in list(tensordict.keys()):
        value = tensordict.get(name)
        if isinstance(value, Tensor):
            tensors[name] = value
        elif type(value).__name__ == "NonTensorStack":
            objects[name] = value.tolist()
        else:
            meta[name] = getattr(value, "data", value)
    return tensors, objects, meta


def _side(name: str) -> str:
    """Where a column is padded."""
    return "left" if name == "prompts" else "right"
