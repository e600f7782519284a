"""Validation: generate on held-out prompts, judge as in training, summarise by data source."""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.config.sampling import SamplingParams
from lockstep.observability.score_summary import score_summary
from lockstep.observability.spans import expect
from lockstep.protocol import DataProto
from lockstep.trainer.ppo.interfaces import Rollout
from lockstep.trainer.ppo.prompts import make_prompts
from lockstep.trainer.ppo.rewards import Judge, Scored, check_validated
from lockstep.trainer.ppo.samples import SampleKeeper, write_samples
from lockstep.trainer.ppo.stages import generate
from lockstep.trainer.run.loop import FIRST
from lockstep.utils.json_values import is_number

VALIDATION_STEPS = 1 << 40
"""Added to the step in the sampling key of validation, so that it draws other numbers than training."""


def validate(
    dataset: Any,
    rollout: Rollout,
    sampling: SamplingParams,
    judge: Judge,
    step: int,
    *,
    n: int,
    batch_size: int | None,
    folder: str | Path | None,
    keeper: SampleKeeper | None = None,
    first: Sequence[int] | None = None,
) -> dict[str, float]:
    """Generate on all prompts of `dataset`, `n` times each and `batch_size` (None: all) at once, and judge; return the metrics below.

    Write the samples into `folder`, if there is one; `keeper` keeps some for `lockstep report`. The metrics of the prompts `first` come a
    second time, with FIRST (trainer/run/loop.py) before their names.
    """
    size = batch_size or len(dataset)
    expect(len(dataset) * n, "responses")
    batches: list[DataProto] = []
    all_scored: list[Scored] = []
    for start in range(0, len(dataset), size):
        rows = range(start, min(start + size, len(dataset)))
        batch = make_prompts(dataset, rows, n, judge.tokenizer.pad_token_id)
        scoring = judge.begin(batch)
        generate(rollout, batch, sampling, step + VALIDATION_STEPS, scoring)
        all_scored.append(judge.judge_validated(batch, step, scoring))
        batches.append(batch)
        if any(all_scored[-1].failures):
            check_validated(DataProto.concat(batches), Scored.concat(all_scored), judge.max_failure_rate, judge.run_dir)
    batch = DataProto.concat(batches)
    scored = Scored.concat(all_scored)
    rewards = [total if failure is None else None for total, failure in zip(scored.total, scored.failures, strict=True)]
    extra: dict[str, list[Any]] = {"said_reward" if name == "reward" else name: said for name, said in scored.extra.items()}
    extra["reward"] = rewards
    extra.pop("score", None)
    if folder is not None:
        write_samples(str(folder), step, batch, extra, judge.tokenizer, scored.failures)
    if keeper is not None:
        # Every batch counts its prompts from 0.
        batch.non_tensor_batch["uid"] = np.array([row // n for row in range(len(batch))], dtype=object)
        keeper.keep(f"val_{step}", batch, scored)
    sources = list(batch.non_tensor_batch.get("data_source", ["unknown"] * len(batch)))

    def metrics_of(rows: Sequence[int]) -> dict[str, float]:
        infos = {name: [values[row] for row in rows] for name, values in extra.items()}
        prompts = [row // n for row in rows]
        return validation_metrics([sources[row] for row in rows], prompts, infos, [scored.failures[row] for row in rows])

    metrics = metrics_of(range(len(batch)))
    if first is not None:
        found = metrics_of([prompt * n + sample for prompt in first for sample in range(n)])
        metrics |= {f"{FIRST}{name}": value for name, value in found.items()}
    return metrics


def validation_metrics(
    data_sources: Sequence[str], prompts: Sequence[int], infos: dict[str, list[Any]], failures: Sequence[Any] | None = None
) -> dict[str, float]:
    """Return `val-core/{source}/{acc or reward}/{mean@N, best@N/mean, maj@N/mean}`, and everything else under `val-aux/`.

    `prompts` says which prompt each row answers (rows of one prompt are its N samples); `infos` holds "reward" and whatever the reward
    function returned, one entry per row (None if it returned nothing for a row). A variable is summarised (`score_summary`) for the
    sources that have a finite number in every row; the core variable of a source is "acc" if there is one, else "reward". A number of the
    core variable has its 95 % interval beside it: `val-aux/{name}/low` and `/high`. maj@k needs a "pred" in every row.

    Rows with a failure (not None) have no reward. They count only in `val-aux/{source}/missing`.
    """
    metrics: dict[str, float] = {}
    failures = [None] * len(data_sources) if failures is None else failures
    sources = np.array(list(data_sources), dtype=object)
    for source in dict.fromkeys(data_sources):
        rows = [row for row in np.flatnonzero(sources == source).tolist() if failures[row] is None]
        missing = int((sources == source).sum()) - len(rows)
        if missing:
            metrics[f"val-aux/{source}/missing"] = float(missing)
        if not rows:
            continue
        groups: dict[int, list[int]] = defaultdict(list)
        for row in rows:
            groups[prompts[row]].append(row)
        numeric = {variable: entries for variable, entries in infos.items() if all(is_number(entries[row]) for row in rows)}
        core = "acc" if "acc" in numeric else "reward"
        preds = infos.get("pred")
        if preds is not None and any(preds[row] is None for row in rows):
            preds = None
        answers = None if preds is None else [[str(preds[row]) for row in rows] for rows in groups.values()]
        for variable, entries in numeric.items():
            scores = [[float(entries[row]) for row in rows] for rows in groups.values()]
            for name, found in score_summary(scores, answers).items():
                is_core = variable == core and name.startswith(("mean@", "best@", "maj@"))
                metrics[f"{'val-core' if is_core else 'val-aux'}/{source}/{variable}/{name}"] = found.value
                if is_core and found.interval is not None:
                    low, high = found.interval
                    metrics[f"val-aux/{source}/{variable}/{name}/low"] = low
                    metrics[f"val-aux/{source}/{variable}/{name}/high"] = high
    return metrics
