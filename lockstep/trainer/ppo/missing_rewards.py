"""What becomes of a batch in which rewards are missing."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lockstep.errors import RewardError
from lockstep.protocol import DataProto
from lockstep.trainer.ppo.plain import plain
from lockstep.trainer.ppo.scored import Scored

_NUM_EXAMPLES = 3


def leave_out(batch: DataProto, rows: Tensor) -> None:
    """Zero the response_mask of `rows` (bool [B]): they take no part in anything that follows."""
    if rows.any():
        mask = batch.ragged("response_mask")
        kept = torch.repeat_interleave(~rows, mask.lengths)
        batch.set("response_mask", mask.like(mask.values * kept.to(mask.values)))


def check_failures(batch: DataProto, scored: Scored, max_failure_rate: float) -> None:
    """Raises RewardError, with examples, when more than `max_failure_rate` of the rewards are missing."""
    failed = [(i, failure) for i, failure in enumerate(scored.failures) if failure is not None]
    if len(failed) <= max_failure_rate * len(batch):
        return
    kinds = Counter(failure.kind for _, failure in failed)
    sources = batch.non_tensor_batch.get("data_source", [None] * len(batch))
    index = batch.non_tensor_batch["index"]
    examples = "\n".join(
        f"--- row {i}, dataset row {index[i]}, data_source {sources[i]!r} ({failure.kind})\n{failure.text.rstrip()}"
        for i, failure in failed[:_NUM_EXAMPLES]
    )
    raise RewardError(
        f"{len(failed)} of {len(batch)} rewards are missing ({', '.join(f'{kind}: {n}' for kind, n in kinds.items())}), more than "
        f"reward.max_failure_rate={max_failure_rate:g} allows\n{examples}"
    )


def record_failures(run_dir: Path, number: int, batch: DataProto, scored: Scored, tokenizer: Any) -> None:
    """Append a line for each missing reward to reward_failures.jsonl, with all that is needed to try again; `number` is the batch's."""
    failed = [(i, failure) for i, failure in enumerate(scored.failures) if failure is not None]
    if not failed:
        return
    run_dir.mkdir(parents=True, exist_ok=True)
    with (run_dir / "reward_failures.jsonl").open("a") as file:
        for i, failure in failed:
            row: dict[str, Any] = {"batch": number, "kind": failure.kind, "error": failure.text}
            row["response"] = tokenizer.decode(batch.ragged("responses")[i].tolist(), skip_special_tokens=True)
            for name in ("index", "data_source", "raw_prompt", "reward_model"):
                row[name] = batch.non_tensor_batch[name][i] if name in batch.non_tensor_batch else None
            file.write(json.dumps(plain(row), allow_nan=False) + "\n")
