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
attention_mask       D     P+T    -               likewise
position_ids         D     P+T    -               likewise
```

Recipes whose loss couples rows (preferences) add a dense column `unit`: rows with the same number are never separated by ranks,
micro-batches or chunks (`DataProto.units`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.padded import (
    TOKEN_COLUMNS,
    BatchView,
    DataProtoItem,
    ForOthers,
    fold_batch_dim,
    merge_meta,
    pad_dataproto_to_divisor,
    unfold_batch_dim,
    unpad_dataproto,
)
from lockstep.ragged import Ragged, tensors_equal

Indices = Sequence[int] | np.ndarray | Tensor | slice
"""What selects rows: positions, a boolean mask, or a slice."""

Column = Tensor | Ragged

__all__ = [
    "BatchView", "Column", "DataProto", "DataProtoItem", "Indices", "Ragged", "fold_batch_dim", "pad_dataproto_to_divisor",
    "unfold_batch_dim", "unpad_dataproto",
]  # fmt: skip


@dataclass(init=False)
class DataProto(ForOthers):
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

    # -- building ----------------------------------------------------------------------------------------------------------

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

    # -- reading -----------------------------------------------------------------------------------------------------------

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
        """Whether prompts and responses are both there as stored rows: what input_ids and its masks are derived from."""
        return all(isinstance(self.columns.get(name), Ragged) for name in TOKEN_COLUMNS)

    def __contains__(self, name: str) -> bool:
        return name in self.columns or name in self.non_tensor_batch

    def __len__(self) -> int:
        for column in (*self.columns.values(), *self.non_tensor_batch.values()):
            return len(column)
        return 0

    def token_counts(self) -> Tensor:
        """Prompt plus response tokens of each row [rows]."""
        counts = torch.zeros(len(self), dtype=torch.int64)
        for name in TOKEN_COLUMNS:
            if name in self.columns:
                counts += self.ragged(name).lengths
        return counts

    def repeats_prompt(self) -> list[bool]:
        """For each row whether its prompt is that of the row before: the samples of a prompt stand together."""
        rows = self.ragged("prompts").rows()
        return [i > 0 and torch.equal(row, rows[i - 1]) for i, row in enumerate(rows)]

    def units(self) -> list[list[int]]:
        """The row numbers of each unit: neighbouring rows with the same number in the column `unit`, which nothing separates (the two
        rows of a pair). Without the column every row is one. Raises ValueError when rows of a unit are apart."""
        if "unit" not in self.columns:
            return [[row] for row in range(len(self))]
        ids = self.columns["unit"].tolist()  # type: ignore[union-attr]
        starts = [row for row in range(len(ids)) if row == 0 or ids[row] != ids[row - 1]]
        if len(starts) != len(set(ids)):
            raise ValueError(f"rows of one unit must stand together, but the column `unit` is {ids}")
        return [list(range(a, b)) for a, b in itertools.pairwise([*starts, len(ids)])]

    # -- choosing columns --------------------------------------------------------------------------------------------------

    def select(self, batch_keys: Sequence[str] | None = None, non_tensor_batch_keys: Sequence[str] | None = None) -> DataProto:
        """Only these columns; None keeps all of that kind. A name that is not there raises KeyError."""
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

    # -- choosing rows -----------------------------------------------------------------------------------------------------

    def select_idxs(self, indices: Indices) -> DataProto:
        """The rows at these positions (or where a boolean mask is true), in that order."""
        positions = _positions(indices, len(self))
        tensors: dict[str, Column] = {
            name: column.select(positions) if isinstance(column, Ragged) else column[positions.to(column.device)]
            for name, column in self.columns.items()
        }
        objects = {name: values[positions.numpy()] for name, values in self.non_tensor_batch.items()}
        return DataProto(tensors, objects, dict(self.meta_info))

    def repeat(self, repeat_times: int = 2, interleave: bool = True) -> DataProto:
        """Each row `repeat_times` times: a,a,b,b when interleaved, a,b,a,b otherwise."""
        rows = torch.arange(len(self))
        return self.select_idxs(rows.repeat_interleave(repeat_times) if interleave else rows.repeat(repeat_times))

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

    def _has_columns_besides(self, name: str | None) -> bool:
        return any(other != name for other in (*self.columns, *self.non_tensor_batch))


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
