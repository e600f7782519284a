"""What the model wrote, as text on disk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lockstep.protocol import DataProto


def write_samples(directory: str, step: int, batch: DataProto, info: dict[str, list[Any]], tokenizer: Any) -> None:
    """Write `{step}.jsonl`: the text, the score and everything the reward function said (`info`) of each row."""
    Path(directory).mkdir(parents=True, exist_ok=True)
    inputs, outputs = (
        tokenizer.batch_decode([row.tolist() for row in batch.ragged(name).rows()], skip_special_tokens=True)
        for name in ("prompts", "responses")
    )
    scores = [row.sum().item() for row in batch.ragged("token_level_scores").rows()]
    truths = [(row or {}).get("ground_truth") for row in batch.non_tensor_batch.get("reward_model", [None] * len(batch))]
    with (Path(directory) / f"{step}.jsonl").open("w") as file:
        for i in range(len(batch)):
            row = {"step": step, "input": inputs[i], "output": outputs[i], "gts": truths[i], "score": scores[i]}
            row |= {key: values[i] for key, values in info.items() if key not in row}
            file.write(json.dumps(row, default=str) + "\n")
