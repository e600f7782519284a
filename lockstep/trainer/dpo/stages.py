"""What an update on preferences needs of a batch beside its rows. Each names the columns it reads and writes.

```text
unit                   D  rows with the same number are a pair
ref_response_log_prob  D  log-prob of the row's response under the reference: the sum over its trained tokens, float64
```
"""

from typing import Any

import torch
from torch import Tensor

from lockstep.algorithms.binding import Bound
from lockstep.algorithms.rows import Rows
from lockstep.errors import DataError, NumericalError
from lockstep.protocol import DataProto, Ragged


def couple_pairs(batch: DataProto) -> None:
    """Writes unit: rows 0 and 1 are a pair, 2 and 3, ..."""
    batch.set("unit", torch.arange(len(batch) // 2).repeat_interleave(2))


def reference_log_prob(reference: Any, batch: DataProto) -> None:
    """Reads prompts, responses, response_mask. Writes ref_response_log_prob."""
    batch.set("ref_response_log_prob", _sums(reference.compute_ref_log_prob(_tokens(batch)), "ref_log_prob", batch))


def actor_log_prob(actor: Any, batch: DataProto) -> Tensor:
    """The log-prob of each response [rows] under the policy as it is. Reads prompts, responses, response_mask."""
    return _sums(actor.compute_log_prob(_tokens(batch)), "old_log_probs", batch)


def whole_batch_columns(prepare: Bound, actor: Any, reference: Any, batch: DataProto, max_length: int) -> None:
    """Writes the columns that the loss's `prepare` computes from the whole batch, where it asks with log-probs of mismatched responses.

    Reads prompts, responses, response_mask, is_chosen.
    """
    given: dict[str, Any] = {"is_chosen": batch.columns["is_chosen"]}
    if {"mismatched_log_prob", "mismatched_ref_log_prob"} & set(prepare.columns):
        others = mismatched(batch, max_length)
        reference_log_prob(reference, others)
        given |= {
            "mismatched_log_prob": actor_log_prob(actor, others),
            "mismatched_ref_log_prob": others.columns["ref_response_log_prob"],
        }
    for name, column in prepare(given, None).items():
        batch.set(name, column)


def mismatched(batch: DataProto, max_length: int) -> DataProto:
    """Each row's prompt with the response of the next row that has another prompt, cut to `max_length` tokens.

    Raises DataError where all prompts are the same.
    """
    prompts, count = batch.ragged("prompts"), len(batch)
    rows = prompts.rows()
    order = []
    for i in range(count):
        others = ((i + step) % count for step in range(1, count))
        found = next((j for j in others if not torch.equal(rows[i], rows[j])), None)
        if found is None:
            raise DataError(
                f"all {count} rows of a batch have the same prompt, but the loss compares with answers to other prompts; raise "
                "data.train_batch_size, or shuffle"
            )
        order.append(found)
    rooms = (max_length - prompts.lengths).tolist()

    def cut(name: str) -> Ragged:
        chosen = batch.ragged(name).select(torch.tensor(order)).rows()
        return Ragged.from_rows([row[:room] for row, room in zip(chosen, rooms, strict=True)])

    columns = {"prompts": prompts, "responses": cut("responses"), "response_mask": cut("response_mask")}
    return DataProto.from_dict(columns, {"index": batch.non_tensor_batch["index"]})


def _tokens(batch: DataProto) -> DataProto:
    return batch.select(["prompts", "responses"], [])


def _sums(found: DataProto, name: str, batch: DataProto) -> Tensor:
    mask, column = batch.ragged("response_mask"), found.ragged(name)
    sums = Rows(mask.lengths).sum(torch.where(mask.values.bool(), column.values, 0.0).double())
    if not sums.isfinite().all():
        bad = [batch.non_tensor_batch["index"][row] for row in (~sums.isfinite()).nonzero().flatten().tolist()]
        raise NumericalError(f"{name} is not finite for {len(bad)} rows; dataset rows {bad[:10]}. Nothing was updated")
    return sums
