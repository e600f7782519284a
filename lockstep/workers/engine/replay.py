"""Which experts a sampler chose, for the tokens of a micro-batch (the column `experts` of rollout.router_replay)."""

from __future__ import annotations

import torch
from torch import Tensor

from lockstep.models.packing import pack_rows
from lockstep.protocol import DataProto, Ragged

ROW = "row_of_experts"
"""A column of row numbers, by which a micro-batch says which rows it has."""


class SampledExperts:
    """What routers chose for the rows of `data`, for the micro-batches that they are packed into.

    Raises ValueError when a row has not `num_layers` times as many experts for each of its tokens, whatever the number.
    """

    def __init__(self, data: DataProto, num_layers: int) -> None:
        experts, lengths = data.ragged("experts"), data.token_counts()
        tokens = int(lengths.sum())
        width = len(experts.values) // tokens if tokens else num_layers
        if not torch.equal(experts.lengths, lengths * width) or width % num_layers:
            raise ValueError(
                f"the column experts does not fit {num_layers} routers: its rows have {experts.lengths.tolist()} numbers for "
                f"{lengths.tolist()} tokens"
            )
        self._table = experts.values.view(-1, num_layers, max(1, width // num_layers))
        """[tokens of all rows, layers, k]"""
        self._places = _places(data)

    def of_rows(self, rows: Tensor, device: torch.device) -> Tensor:
        """[N, layers, k]: for the N tokens of the micro-batch that has these rows."""
        packed = pack_rows(self._places.select_idxs(rows.cpu()), torch.device("cpu"))
        return self._table[packed.input_ids[0]].to(device, torch.int64)


def _places(data: DataProto) -> DataProto:
    """The rows with the number of each token among all of them in the place of the token: packed as the tokens are, it says which lies
    where. Equal prompts have equal numbers, so that they are shared as the tokens are."""
    prompts, responses = data.ragged("prompts"), data.ragged("responses")
    starts = torch.cumsum(data.token_counts(), 0) - data.token_counts()
    first: dict[bytes, int] = {}
    own = [first.setdefault(row.numpy().tobytes(), int(start)) for row, start in zip(prompts.rows(), starts, strict=True)]
    columns = {
        "prompts": _counting(torch.tensor(own, dtype=torch.int64), prompts.lengths),
        "responses": _counting(starts + prompts.lengths, responses.lengths),
    }
    return DataProto.from_dict(columns)


def _counting(starts: Tensor, lengths: Tensor) -> Ragged:
    """Rows of these lengths that count up from these numbers."""
    return Ragged.from_rows([torch.arange(start, start + n) for start, n in zip(starts.tolist(), lengths.tolist(), strict=True)])
