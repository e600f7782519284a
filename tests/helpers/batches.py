"""Small batches as the trainer has them."""

import torch

from lockstep.protocol import DataProto, Ragged


def column(rows, dtype=torch.float32):
    return Ragged.from_rows(rows, dtype=dtype)


def rows_of(batch, name):
    return [row.tolist() for row in batch.ragged(name).rows()]


def make_batch(responses=((5, 6, 7), (8,)), mask=None, **columns):
    """Rows 30, 31, ... of a dataset, two samples per prompt."""
    mask = mask or [[1] * len(row) for row in responses]
    tensors = {
        "prompts": column([[1, 2]] * len(responses), torch.int64),
        "responses": column(responses, torch.int64),
        "response_mask": column(mask, torch.int64),
        **{name: column(rows) for name, rows in columns.items()},
    }
    objects = {
        "index": [30 + i for i in range(len(responses))],
        "uid": [str(i // 2) for i in range(len(responses))],
        "sample": [i % 2 for i in range(len(responses))],
        "raw_prompt": [f"question {i}" for i in range(len(responses))],
    }
    return DataProto.from_dict(tensors, objects, {"pad_token_id": 0})
