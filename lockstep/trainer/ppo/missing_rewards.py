"""What becomes of a batch in which rewards are missing."""

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lockstep.errors import RewardError
from lockstep.protocol import DataProto
from lockstep.rewards.outcome import RETRIED_KINDS
from lockstep.trainer.ppo.plain import plain
from lockstep.trainer.ppo.scored import Scored
from lockstep.utils.files import named_errors

FAILURES = "reward_failures.jsonl"
_NUM_EXAMPLES = 3
_CHANCE = 1e-3


def leave_out(batch: DataProto, rows: Tensor) -> None:
    """Zero the response_mask of `rows` (bool [B]): they take no part in anything that follows."""
    if rows.any():
        mask = batch.ragged("response_mask")
        kept = torch.repeat_interleave(~rows, mask.lengths)
        batch.set("response_mask", mask.like(mask.values * kept.to(mask.values)))


def check_failures(batch: DataProto, scored: Scored, max_failure_rate: float, run_dir: Path | None = None) -> None:
    """Raises RewardError, with examples, when more than `max_failure_rate` of the rewards are missing. They are recorded in `run_dir`."""
    num_missing = sum(failure is not None for failure in scored.failures)
    if num_missing > max_failure_rate * len(batch):
        raise _too_many(batch, scored, max_failure_rate, run_dir)


def check_validated(batch: DataProto, scored: Scored, max_failure_rate: float, run_dir: Path | None = None) -> None:
    """`check_failures` for the rows of a validation, which may be few: raises RewardError when all rewards are missing, or so many that
    chance explains it in less than one of 1,000 validations in which each is missing with the probability `max_failure_rate`."""
    num_missing = sum(failure is not None for failure in scored.failures)
    are_all = num_missing == len(batch) and max_failure_rate < 1.0
    if num_missing and (are_all or chance_of(num_missing, len(batch), max_failure_rate) < _CHANCE):
        raise _too_many(batch, scored, max_failure_rate, run_dir)


def chance_of(count: int, num_rows: int, rate: float) -> float:
    """The probability that `count` rows or more of `num_rows` fail where each fails with the probability `rate`."""
    if rate <= 0.0 or rate >= 1.0:
        return float(count <= 0 or rate >= 1.0)
    whole = math.lgamma(num_rows + 1)
    logs = (
        whole - math.lgamma(k + 1) - math.lgamma(num_rows - k + 1) + k * math.log(rate) + (num_rows - k) * math.log1p(-rate)
        for k in range(count, num_rows + 1)
    )
    return min(1.0, math.fsum(map(math.exp, logs)))


def _too_many(batch: DataProto, scored: Scored, max_failure_rate: float, run_dir: Path | None) -> RewardError:
    failed = [(i, failure) for i, failure in enumerate(scored.failures) if failure is not None]
    kinds = Counter(failure.kind for _, failure in failed)
    sources = batch.non_tensor_batch.get("data_source", [None] * len(batch))
    index = batch.non_tensor_batch["index"]
    examples = "\n".join(
        f"--- row {i}, dataset row {index[i]}, data_source {sources[i]!r} ({failure.kind})\n{failure.text.rstrip()}"
        for i, failure in failed[:_NUM_EXAMPLES]
    )
    everything = "" if run_dir is None else f"all failures: {run_dir / FAILURES}"
    rate = math.ceil(20 * len(failed) / len(batch)) / 20  # the next of 0.05, 0.1, ...
    cures = [f"allow more with reward.max_failure_rate={rate:g}"]
    if "environment" in kinds:
        cures.insert(0, "set agent.retries higher")
    if set(kinds) & set(RETRIED_KINDS):
        cures.insert(0, "raise reward.retries" if any(scored.retries) else "set reward.retries=3")
    return RewardError(
        f"{len(failed)} of {len(batch)} rewards are missing ({', '.join(f'{kind}: {n}' for kind, n in kinds.items())}), more than "
        f"reward.max_failure_rate={max_failure_rate:g} allows; {', or '.join(cures)}\n{everything}\n{examples}\n"
        f"--- {min(_NUM_EXAMPLES, len(failed))} of {len(failed)} failures are shown; the cure stands above them. {everything}"
    )


def record_failures(run_dir: Path, number: int, batch: DataProto, scored: Scored, tokenizer: Any) -> None:
    """Append a line for each missing reward to reward_failures.jsonl, with all that is needed to try again; `number` is the batch's."""
    failed = [(i, failure) for i, failure in enumerate(scored.failures) if failure is not None]
    if not failed:
        return
    run_dir.mkdir(parents=True, exist_ok=True)
    with named_errors(run_dir / FAILURES), (run_dir / FAILURES).open("a") as file:
        for i, failure in failed:
            row: dict[str, Any] = {"batch": number, "kind": failure.kind, "error": failure.text, "retries": failure.num_retries}
            row["response"] = tokenizer.decode(batch.ragged("responses")[i].tolist(), skip_special_tokens=True)
            for name in ("index", "data_source", "raw_prompt", "reward_model"):
                row[name] = batch.non_tensor_batch[name][i] if name in batch.non_tensor_batch else None
            file.write(json.dumps(plain(row), allow_nan=False) + "\n")
