"""DataProto: the batch that travels between the trainer and its workers.

A batch is rows. A column of it is one of three things:

- `Ragged`: one vector per row, of any length (token ids, per-token numbers). Stored without padding.
- dense: a tensor whose first dimension is the row.
- object: a numpy object array (dicts, strings).

`data.ragged(name)` gives a ragged column as stored, and `data[i]` a row. Only `data.batch[name]` pads: it makes the block that
reward managers written for other systems expect, and Lockstep itself reads no ragged column by it. Parameters are never columns: they are
arguments of the call, or `meta_info` where they describe the data itself.

The ledger of columns (R ragged, D dense, O object; T response tokens, P prompt tokens), each with the function of `trainer/ppo` that adds
it; tests/trainer/ppo/test_ledger.py compares it with a step.

```text
column               kind  shape  written by      meaning
index                O     -      RLHFDataset     row number in the dataset; part of the sampling key
raw_prompt           O     -      RLHFDataset     the message list or string before the chat template
data_source          O     -      RLHFDataset     the tag that chooses the reward
reward_model         O     -      RLHFDataset     {style, ground_truth}
extra_info           O     -      RLHFDataset     anything the reward function wants
prompts              R     P      RLHFDataset     prompt token ids
uid                  O     -      make_prompts    one id per prompt; its n samples share it
sample               O     -      make_prompts    0..n-1 within the prompt
responses            R     T      generate        sampled token ids
response_mask        R     T      generate        1 where the policy wrote the token, 0 elsewhere (tools, user turns);
                                                  all 0 in a row that is left out: its reward is missing, or it was rejected
rollout_log_probs    R     T      generate        log-prob of the token under the sampler; NaN where the policy did not write it
finish_reason        O     -      generate        "stop", "length", "abort", or "error": a request without a response (0 tokens)
experts              R     -      generate        rollout.router_replay: what routers chose for each token of prompt and response
turn                 R     T      play_rows       of an episode: the policy's turn that a token belongs to, from 1
restarts             R     T      play_rows       of an episode (agent.history=template): 1 where a token begins a new context, all
                                                  that the policy sees from there on
turn_rewards         R     T      play_rows       of an episode: what its environment said of a turn, on the turn's last sampled token
last_turn            R     -      play_rows       of an episode: the tokens of the policy's last turn, which a reward function judges
episode              O     -      play_rows       of an episode: turns, calls, faults, messages, info, error
rm_scores            R     T      model_scores    a reward model's score, on the last token
rm_judged            D     -      model_scores    whether the reward model scored the row
token_level_scores   R     T      score           the reward, on the last token
reward_baselines     D     -      baselines       score of the greedy answer to the row's prompt (remax)
reward_parts         D     K      set_parts       parts of the reward; meta_info["reward_part_names"] names them (gdpo)
old_log_probs        R     T      old_log_prob    log-prob under the policy before the update; absent where the one update computes it;
                                                  from use_sampler_log_probs where the sampler's are exact
entropys             R     T      old_log_prob    entropy of the policy at the token
ref_log_prob         R     T      ref_log_prob    log-prob under the reference policy
values               R     T      values          the critic's estimate before the token
rollout_is_weights   R     T      correct         weight of the token's policy loss, where algorithm.rollout_correction asks for it
token_level_rewards  R     T      shape_rewards   score minus the KL penalty, where that is on
advantages           R     T      estimate        what the actor learns from
returns              R     T      estimate        what the critic learns from
input_ids            D     P+T    -               derived from prompts and responses, only in `data.batch` and `data[i]`
attention_mask       D     P+T    -               derived, like input_ids
position_ids         D     P+T    -               derived, like input_ids
```

Recipes whose loss couples rows (preferences) add a dense column `unit`: rows with the same number are never separated by ranks,
micro-batches or chunks (`DataProto.units`).
"""

from __future__ import annotations

import errno
import itertools
import math
from collections.abc import Callable, Iterator, KeysView, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.ragged import Ragged, padding_mask, tensors_equal

Indices = Sequence[int] | np.ndarray | Tensor | slice
"""Selects rows: positions, a boolean mask, or a slice."""

Column = Tensor | Ragged

DERIVED = ("input_ids", "attention_mask", "position_ids")
"""Columns of the padded view that are derived from prompts and responses."""
TOKEN_COLUMNS = ("prompts", "responses")

__all__ = [
    "BatchView", "Column", "DataProto", "DataProtoItem", "Indices", "Ragged", "fold_batch_dim", "pad_dataproto_to_divisor",
    "unfold_batch_dim", "unpad_dataproto",
]  # fmt: skip


@dataclass(init=False)
class DataProto:
    """Rows with named columns; see the module's docstring. Methods return new objects unless they say "in place"."""

    columns: dict[str, Column]
    """Ragged and dense columns, as stored."""
    non_tensor_batch: dict[str, np.ndarray]
    """Object columns."""
    meta_info: dict[str, Any]
    """Facts about the batch as a whole, such as `pad_token_id`."""

    def __init__(
        self,
        columns: dict[str, Column] | None = None,
        non_tensor_batch: Mapping[str, Any] | None = None,
        meta_info: dict[str, Any] | None = None,
        *,
        batch: Any = None,
    ) -> None:
        """`batch`, a TensorDict or another mapping of tensors, may be given instead of `columns`."""
        self.columns = dict(batch.items()) if batch is not None else columns if columns is not None else {}
        self.non_tensor_batch = {k: _object_array(v) for k, v in (non_tensor_batch or {}).items()}
        self.meta_info = {} if meta_info is None else meta_info
        self.check_consistency()

    # -- building -----------------------------------------------------------------------------------------------------------

    @classmethod
    def from_dict(
        cls,
        tensors: Mapping[str, Column] | None = None,
        non_tensors: Mapping[str, Any] | None = None,
        meta_info: Mapping[str, Any] | None = None,
        auto_padding: bool = False,
    ) -> DataProto:
        """Columns by kind. Every column must have the same number of rows. (`auto_padding` is verl's and needs nothing: rows are shared
        out without padding.)"""
        return cls(dict(tensors or {}), dict(non_tensors or {}), dict(meta_info or {}))

    @classmethod
    def from_single_dict(
        cls, data: Mapping[str, Any], meta_info: Mapping[str, Any] | None = None, auto_padding: bool = False
    ) -> DataProto:
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

    @classmethod
    def from_tensordict(cls, tensordict: Any, meta_info: Mapping[str, Any] | None = None) -> DataProto:
        """Read a TensorDict made by `to_tensordict`: tensors are columns, lists object columns, everything else `meta_info`."""
        return cls(*from_tensordict(tensordict, meta_info))

    @classmethod
    def load_from_disk(cls, path: str | Path) -> DataProto:
        """Read a file of `save_to_disk`. The file is unpickled: read only files you trust."""
        return cls(*torch.load(path, weights_only=False))

    def set(self, name: str, column: Column) -> None:
        """Add or replace a tensor column, in place."""
        if self._has_columns_besides(name) and len(column) != len(self):
            raise ValueError(f"column {name!r} has {len(column)} rows, the batch has {len(self)}")
        self.columns[name] = column

    def check_consistency(self) -> None:
        """Raise ValueError unless every column has the same number of rows."""
        sizes = {name: len(column) for name, column in (*self.columns.items(), *self.non_tensor_batch.items())}
        if len(set(sizes.values())) > 1:
            raise ValueError(f"columns differ in their number of rows: {sizes}")

    # -- reading ------------------------------------------------------------------------------------------------------------

    @property
    def batch(self) -> BatchView:
        """The tensor columns, padded."""
        return BatchView(self)

    def ragged(self, name: str) -> Ragged:
        """A ragged column as stored."""
        column = self.columns[name]
        if not isinstance(column, Ragged):
            raise TypeError(f"column {name!r} is a dense tensor, not ragged")
        return column

    def has_token_rows(self) -> bool:
        """True if prompts and responses are both stored as ragged rows, so that input_ids and its masks can be derived."""
        return all(isinstance(self.columns.get(name), Ragged) for name in TOKEN_COLUMNS)

    def __contains__(self, name: str) -> bool:
        return name in self.columns or name in self.non_tensor_batch

    def __len__(self) -> int:
        for column in (*self.columns.values(), *self.non_tensor_batch.values()):
            return len(column)
        return 0

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

    def token_counts(self) -> Tensor:
        """Prompt plus response tokens of each row [rows]."""
        counts = torch.zeros(len(self), dtype=torch.int64)
        for name in TOKEN_COLUMNS:
            if name in self.columns:
                counts += self.ragged(name).lengths
        return counts

    def repeats_prompt(self) -> list[bool]:
        """For each row, True if its prompt equals the prompt of the row before (samples of a prompt stand together)."""
        rows = self.ragged("prompts").rows()
        return [i > 0 and torch.equal(row, rows[i - 1]) for i, row in enumerate(rows)]

    def units(self) -> list[list[int]]:
        """Return the row numbers of each unit.

        A unit is a run of rows with the same number in the column `unit`, such as the two rows of a pair; nothing separates them.
        Without the column every row is a unit. Raise ValueError if rows of a unit are apart."""
        if "unit" not in self.columns:
            return [[row] for row in range(len(self))]
        column = self.columns["unit"]
        assert isinstance(column, Tensor)
        ids = column.tolist()
        starts = [row for row in range(len(ids)) if row == 0 or ids[row] != ids[row - 1]]
        if len(starts) != len(set(ids)):
            raise ValueError(f"rows of one unit must stand together, but the column `unit` is {ids}")
        return [list(range(a, b)) for a, b in itertools.pairwise([*starts, len(ids)])]

    def to_tensordict(self) -> DataProto:
        """See the function of this name."""
        return to_tensordict(self)

    def save_to_disk(self, path: str | Path) -> None:
        """Write the batch to one file. Raises OSError."""
        Path(path).open("wb").close()  # a path that cannot be written to says so itself
        try:
            torch.save((self.columns, self.non_tensor_batch, self.meta_info), path)
        except RuntimeError as error:  # what torch makes of a disk that is full
            raise OSError(errno.ENOSPC, f"not written whole ({str(error).splitlines()[0]})", str(path)) from error

    # -- choosing columns ---------------------------------------------------------------------------------------------------

    def select(self, batch_keys: Sequence[str] | None = None, non_tensor_batch_keys: Sequence[str] | None = None) -> DataProto:
        """Return only these columns; None keeps all columns of that kind. Raise KeyError for an unknown name."""
        tensors = self.columns if batch_keys is None else {k: self.columns[k] for k in batch_keys}
        objects = (
            self.non_tensor_batch if non_tensor_batch_keys is None else {k: self.non_tensor_batch[k] for k in non_tensor_batch_keys}
        )
        return DataProto(dict(tensors), dict(objects), dict(self.meta_info))

    def rename(self, old_keys: Sequence[str], new_keys: Sequence[str]) -> DataProto:
        """Rename tensor columns, in place."""
        for old, new in zip(old_keys, new_keys, strict=True):
            self.columns[new] = self.columns.pop(old)
        return self

    def union(self, other: DataProto) -> DataProto:
        """Add the other's columns, in place. A column in both must have equal values, else ValueError and nothing is added."""
        if self._has_columns_besides(None) and other._has_columns_besides(None) and len(self) != len(other):
            raise ValueError(f"cannot join a batch of {len(self)} rows with one of {len(other)}")
        differ = [n for n, column in other.columns.items() if n in self.columns and not _columns_equal(self.columns[n], column)]
        for name, values in other.non_tensor_batch.items():
            mine = self.non_tensor_batch.get(name, values)
            if not all(_objects_equal(a, b) for a, b in zip(mine, values, strict=True)):
                differ.append(name)
        if differ:
            raise ValueError(f"columns {differ} are in both batches with different values")
        self.columns |= other.columns
        self.non_tensor_batch |= other.non_tensor_batch
        self.meta_info |= other.meta_info
        return self

    def pop(
        self, batch_keys: Sequence[str] = (), non_tensor_batch_keys: Sequence[str] = (), meta_info_keys: Sequence[str] | None = None
    ) -> DataProto:
        """Remove columns, in place, and return them as a batch.

        Derived columns (`DERIVED`) are not stored, so naming them removes nothing. The returned batch has the entries of meta_info that
        `meta_info_keys` names, which leave this batch, or without `meta_info_keys` a copy of all entries."""
        stored = [k for k in batch_keys if k in self.columns or k not in DERIVED or not self.has_token_rows()]
        tensors = {k: self.columns.pop(k) for k in stored}
        objects = {k: self.non_tensor_batch.pop(k) for k in non_tensor_batch_keys}
        meta = dict(self.meta_info) if meta_info_keys is None else {k: self.meta_info.pop(k) for k in meta_info_keys}
        return type(self)(tensors, objects, meta)

    # -- choosing rows ------------------------------------------------------------------------------------------------------

    def select_idxs(self, indices: Indices) -> DataProto:
        """Return the rows at these positions (or where a boolean mask is true), in that order."""
        positions = _positions(indices, len(self))
        tensors: dict[str, Column] = {
            name: column.select(positions) if isinstance(column, Ragged) else column[positions.to(column.device)]
            for name, column in self.columns.items()
        }
        objects = {name: values[positions.numpy()] for name, values in self.non_tensor_batch.items()}
        return DataProto(tensors, objects, dict(self.meta_info))

    def repeat(self, repeat_times: int = 2, interleave: bool = True) -> DataProto:
        """Repeat each row `repeat_times` times: a,a,b,b if interleaved, else a,b,a,b."""
        rows = torch.arange(len(self))
        return self.select_idxs(rows.repeat_interleave(repeat_times) if interleave else rows.repeat(repeat_times))

    def sample_level_repeat(self, repeat_times: Sequence[int]) -> DataProto:
        """Row i `repeat_times[i]` times."""
        return self.select_idxs(torch.arange(len(self)).repeat_interleave(torch.as_tensor(repeat_times, dtype=torch.int64)))

    def slice(self, start: int | None = None, end: int | None = None, step: int | None = None) -> DataProto:
        """Rows start:end:step."""
        return self.select_idxs(slice(start, end, step))

    def reorder(self, indices: Tensor) -> None:
        """Put the rows in this order, in place."""
        ordered = self.select_idxs(indices)
        self.columns, self.non_tensor_batch = ordered.columns, ordered.non_tensor_batch

    def padding(self, padding_size: int, padding_candidate: str = "first") -> None:
        """Add the first or the last row `padding_size` times at the end, in place."""
        if padding_size:
            row = {"first": 0, "last": len(self) - 1}[padding_candidate]
            longer = self.select_idxs(torch.cat([torch.arange(len(self)), torch.full((padding_size,), row)]))
            self.columns, self.non_tensor_batch = longer.columns, longer.non_tensor_batch

    def chunk(self, chunks: int) -> list[DataProto]:
        """`chunks` runs of neighbouring rows whose sizes differ by at most one; some are empty when there are too few rows."""
        bounds = [len(self) * i // chunks for i in range(chunks + 1)]
        return [self.slice(a, b) for a, b in itertools.pairwise(bounds)]

    def split(self, split_size: int) -> list[DataProto]:
        """Runs of `split_size` rows; the last may be shorter."""
        return [self.slice(i, i + split_size) for i in range(0, len(self), split_size)]

    def make_iterator(self, mini_batch_size: int, epochs: int, seed: int | None = None) -> Iterator[DataProto]:
        """Mini-batches of that many rows, `epochs` times over; each epoch in a new order when `seed` is given."""
        if len(self) % mini_batch_size:
            raise ValueError(f"{len(self)} rows cannot be cut into mini-batches of {mini_batch_size}")
        generator = torch.Generator().manual_seed(seed) if seed is not None else None
        for _ in range(epochs):
            order = torch.randperm(len(self), generator=generator) if generator else torch.arange(len(self))
            for rows in order.split(mini_batch_size):
                yield self.select_idxs(rows)

    def fold_batch_dim(self, new_batch_size: int) -> DataProto:
        """See the function of this name."""
        return fold_batch_dim(self, new_batch_size)

    def unfold_batch_dim(self, batch_dims: int = 2) -> DataProto:
        """See the function of this name."""
        return unfold_batch_dim(self, batch_dims)

    @staticmethod
    def concat(parts: Sequence[DataProto]) -> DataProto:
        """The rows of all parts, one after the other. Every part must have the same columns.

        `meta_info` has the entries of all parts, "metrics" as lists by name. Raises ValueError for an entry on which parts differ.
        """
        if not parts:
            raise ValueError("nothing to concatenate")
        names = {frozenset((*p.columns, *p.non_tensor_batch)) for p in parts}
        if len(names) > 1:
            raise ValueError(f"parts have different columns: {[sorted(n) for n in names]}")
        tensors: dict[str, Column] = {}
        for name, first in parts[0].columns.items():
            columns = [p.columns[name] for p in parts]
            tensors[name] = Ragged.cat(columns) if isinstance(first, Ragged) else torch.cat(columns)  # type: ignore[arg-type]
        objects = {name: np.concatenate([p.non_tensor_batch[name] for p in parts]) for name in parts[0].non_tensor_batch}
        return DataProto(tensors, objects, merge_meta([part.meta_info for part in parts], _objects_equal))

    def to(self, device: torch.device | str) -> DataProto:
        """Tensor columns on another device."""
        return type(self)({k: c.to(device) for k, c in self.columns.items()}, dict(self.non_tensor_batch), dict(self.meta_info))

    def _has_columns_besides(self, name: str | None) -> bool:
        return any(other != name for other in (*self.columns, *self.non_tensor_batch))


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
        """The number of rows, as in a TensorDict."""
        return len(self._data)

    def keys(self) -> KeysView[str]:
        """The names of the columns, derived columns included."""
        return dict.fromkeys(self).keys()

    @property
    def batch_size(self) -> torch.Size:
        """The number of rows, as in a TensorDict."""
        return torch.Size([len(self._data)])

    def pop(self, name: str) -> Tensor:
        """Remove the column and return it padded."""
        column = self[name]
        del self._data.columns[name]
        return column


@dataclass
class DataProtoItem:
    """One row, as `data[i]` gives it: `batch` maps names to views of this row's tensors, without padding."""

    batch: dict[str, Tensor]
    non_tensor_batch: dict[str, Any]
    meta_info: dict[str, Any]


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
    """Undo `fold_batch_dim`: the first `batch_dims` dimensions become rows again."""
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


def _positions(indices: Indices, rows: int) -> Tensor:
    if isinstance(indices, slice):
        return torch.tensor(range(rows)[indices], dtype=torch.int64)
    positions = torch.as_tensor(np.asarray(indices) if not isinstance(indices, Tensor) else indices.cpu())
    if positions.dtype == torch.bool:
        if len(positions) != rows:
            raise IndexError(f"the mask has {len(positions)} entries, the batch {rows} rows")
        return positions.nonzero().flatten()
    positions = positions.to(torch.int64).reshape(-1)
    if len(positions) and (int(positions.max()) >= rows or int(positions.min()) < -rows):
        raise IndexError(f"row {positions.tolist()} is outside a batch of {rows} rows")
    return positions % rows if rows else positions


def _object_array(values: Any) -> np.ndarray:
    """A 1-D object array even when the values are themselves sequences of one length."""
    if isinstance(values, np.ndarray) and values.dtype == object and values.ndim == 1:
        return values
    array = np.empty(len(values), dtype=object)
    for i, value in enumerate(values):
        array[i] = value
    return array


def _columns_equal(a: Column, b: Column) -> bool:
    if isinstance(a, Ragged) or isinstance(b, Ragged):
        return isinstance(a, Ragged) and isinstance(b, Ragged) and a.equal(b)
    return tensors_equal(a, b)


def _objects_equal(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        return np.array_equal(np.asarray(a), np.asarray(b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_objects_equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and type(a) is type(b):
        return len(a) == len(b) and all(map(_objects_equal, a, b))
    if isinstance(a, float) and isinstance(b, float) and math.isnan(a) and math.isnan(b):
        return True
    return bool(a == b)
