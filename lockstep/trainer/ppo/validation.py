"""Validation: generate on held-out prompts, score with the function reward, summarise by data source."""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.config.sampling import SamplingParams
from lockstep.protocol import DataProto
from lockstep.trainer.ppo.kept_samples import SampleKeeper
from lockstep.trainer.ppo.rewards import Judge
from lockstep.trainer.ppo.samples import write_samples
from lockstep.trainer.ppo.scored import Scored
from lockstep.trainer.ppo.stages import generate, make_prompts

_MAX_CHOICES = 1000
_VALIDATION_STEPS = 1 << 40
"""Added to the step in the sampling key of validation, so that it draws other numbers than training."""


def validate(
    dataset: Any,
    rollout: Any,
    sampling: SamplingParams,
    judge: Judge,
    step: int,
    *,
    n: int,
    batch_size: int | None,
    folder: str | Path | None,
    keeper: SampleKeeper | None = None,
) -> dict[str, float]:
    """Generate on all prompts of `dataset`, `n` times each and `batch_size` (None: all) at once, and judge; returns the metrics below.

    Writes the samples into `folder`, where there is one; `keeper` keeps some for `lockstep report`.
    """
    size = batch_size or len(dataset)
    parts, all_scored = [], []
    for start in range(0, len(dataset), size):
        rows = range(start, min(start + size, len(dataset)))
        batch = make_prompts(dataset, rows, n, judge.tokenizer.pad_token_id)
        scoring = judge.begin(batch)
        generate(rollout, batch, sampling, step + _VALIDATION_STEPS, getattr(scoring, "add", None))
        all_scored.append(judge.judge(batch, step, scoring))
        parts.append(batch)
    batch, scored = DataProto.concat(parts), Scored.concat(all_scored)
    extra: dict[str, list[Any]] = {"reward": scored.total} | scored.extra
    extra.pop("score", None)
    if folder is not None:
        write_samples(str(folder), step, batch, extra, judge.tokenizer)
    if keeper is not None:
        # Every batch counts its prompts from 0.
        batch.non_tensor_batch["uid"] = np.array([row // n for row in range(len(batch))], dtype=object)
        keeper.keep(f"val_{step}", batch, scored)
    sources = list(batch.non_tensor_batch.get("data_source", ["unknown"] * len(batch)))
    return validation_metrics(sources, [row // n for row in range(len(batch))], extra, scored.failures)


def validation_metrics(
    data_sources: Sequence[str], prompts: Sequence[int], infos: dict[str, list[Any]], failures: Sequence[Any] | None = None
) -> dict[str, float]:
    """`val-core/{source}/{acc or reward}/{mean@N, best@N/mean, maj@N/mean}`, and everything else under `val-aux/`.

    `prompts` says which prompt each row answers (rows of one prompt are its N samples); `infos` holds "reward" and whatever the reward
    function returned, one entry a row (None where it said nothing of a row). A variable is summarised for the sources that have a number
    in every row; the core variable of a source is "acc" where it has one, else "reward". best@k is the exact mean of the best of k over
    all ways to choose k of the N samples. maj@k takes the most frequent "pred" of k (ties: the first) and needs one in every row; its mean
    is over all ways to choose k of N, or over 1,000 of them where there are more.

    Rows with a failure (not None) have no reward: they are in no number but `val-aux/{source}/missing`, their count.
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
        numeric = {
            variable: entries
            for variable, entries in infos.items()
            if all(isinstance(entries[row], int | float | np.number | np.bool_) for row in rows)
        }
        core = "acc" if "acc" in numeric else "reward"
        preds = infos.get("pred")
        if preds is not None and any(preds[row] is None for row in rows):
            preds = None
        for variable, entries in numeric.items():
            for name, value in _summary(groups, entries, preds).items():
                is_core = variable == core and name.startswith(("mean@", "best@", "maj@")) and not name.endswith("/std")
                metrics[f"{'val-core' if is_core else 'val-aux'}/{source}/{variable}/{name}"] = value
    return metrics


def _summary(groups: dict[int, list[int]], entries: Sequence[Any], preds: Sequence[Any] | None) -> dict[str, float]:
    scores = [[float(entries[row]) for row in rows] for rows in groups.values()]
    n = max(len(s) for s in scores)
    summary = {f"mean@{n}": float(np.mean([np.mean(s) for s in scores]))}
    if n == 1:
        return summary
    summary[f"std@{n}"] = float(np.mean([np.std(s, ddof=1) for s in scores if len(s) > 1]))
    for k in _sizes(n):
        usable = [s for s in scores if len(s) >= k]
        summary[f"best@{k}/mean"] = float(np.mean([expected_best(s, k) for s in usable]))
        summary[f"worst@{k}/mean"] = float(np.mean([-expected_best([-x for x in s], k) for s in usable]))
        if preds is not None:
            chosen = (_majority(rows, k, entries, preds) for rows in groups.values() if len(rows) >= k)
            summary[f"maj@{k}/mean"] = float(np.mean(list(chosen)))
    return summary


def expected_best(scores: Sequence[float], k: int) -> float:
    """The mean of the largest of k scores over all subsets of size k. In order, score i (from 0) is the largest of C(i, k-1) of them."""
    total = math.comb(len(scores), k)
    return sum(score * math.comb(i, k - 1) / total for i, score in enumerate(sorted(scores)))


def _sizes(n: int) -> list[int]:
    """2, 4, 8, ... and n."""
    return [2**i for i in range(1, n.bit_length()) if 2**i < n] + [n]


def _majority(rows: list[int], k: int, entries: Sequence[Any], preds: Sequence[Any]) -> float:
    """The mean, over ways to choose k of the rows in their order, of the entry that the most frequent prediction has first."""
    if math.comb(len(rows), k) <= _MAX_CHOICES:
        choices = [list(choice) for choice in itertools.combinations(rows, k)]
    else:
        generator = np.random.default_rng(0)
        choices = [[rows[i] for i in sorted(generator.choice(len(rows), k, replace=False))] for _ in range(_MAX_CHOICES)]
    winners = [Counter(str(preds[row]) for row in choice).most_common(1)[0][0] for choice in choices]
    first = [next(row for row in choice if str(preds[row]) == winner) for choice, winner in zip(choices, winners, strict=True)]
    return float(np.mean([float(entries[row]) for row in first]))
