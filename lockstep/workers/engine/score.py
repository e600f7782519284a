"""One number for each row, from a model with a score head."""

import torch
from torch import Tensor

from lockstep.models.packing import Budget, cut_into_micro_batches, pack_sequences
from lockstep.protocol import DataProto, Ragged
from lockstep.workers.engine.base import TrainEngine
from lockstep.workers.engine.micro_batches import LazySequence, join_rows


@torch.no_grad()
def score_rows(engine: TrainEngine, rows: Ragged, budget: Budget, pad_token_id: int) -> Tensor:
    """One score for each row of token ids [rows], read where transformers reads it."""
    engine.module.eval()
    data, own = join_rows(DataProto.from_dict({"rows": rows}), engine.model_group)
    rows = data.ragged("rows")
    batches = engine.equal_counts(cut_into_micro_batches(rows.lengths.tolist(), budget.times(engine.token_ranks)))
    packs = LazySequence(
        len(batches),
        lambda n: pack_sequences(rows.select(torch.tensor(batches[n], dtype=torch.int64)), pad_token_id, engine.device),
    )
    with engine.on_device():
        found = zip(packs, engine.columns(packs, 1.0), strict=True)
        scores = [out["scores"] for packed, out in found if not packed.is_placeholder]
    return torch.cat(scores).cpu()[list(own)] if scores else torch.empty(0)
