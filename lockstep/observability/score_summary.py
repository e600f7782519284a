"""The numbers of a set of questions that were answered several times each: mean@n, best@k (pass@k), worst@k and maj@k, with intervals.

Validation in training and `lockstep eval` both show these.
"""

import itertools
import math
from collections import Counter
from collections.abc import Sequence

import numpy as np

from lockstep.observability.statistics import Estimate, estimate, expected_best

_MAX_CHOICES = 1000


def score_summary(scores: Sequence[Sequence[float]], preds: Sequence[Sequence[str]] | None = None) -> dict[str, Estimate]:
    """`mean@n`, and for n > 1 `std@n`, and for k = 2, 4, 8, ... n `best@k/mean`, `worst@k/mean` and, with `preds`, `maj@k/mean`.

    `scores` and `preds` have the samples of each question; n is the most that one has, and a question with fewer than k counts for no
    number of k. best@k is the exact mean of the best of k over all ways to choose k of the samples: for scores 0 and 1 pass@k without
    bias. maj@k is the score of the most frequent prediction of k (ties: the first), over all ways to choose, or 1,000 of them.
    """
    n = max(map(len, scores))
    is_binary = all(score in (0.0, 1.0) for of_one in scores for score in of_one)
    summary = {f"mean@{n}": estimate([float(np.mean(s)) for s in scores], sum(map(len, scores)) if is_binary else None)}
    if n == 1:
        return summary
    summary[f"std@{n}"] = Estimate(float(np.mean([np.std(s, ddof=1) for s in scores if len(s) > 1])), None)
    for k in sizes(n):
        usable = [i for i, s in enumerate(scores) if len(s) >= k]
        num_used = sum(len(scores[i]) for i in usable) if is_binary else None
        values = {
            f"best@{k}/mean": [expected_best(scores[i], k) for i in usable],
            f"worst@{k}/mean": [-expected_best([-x for x in scores[i]], k) for i in usable],
        }
        if preds is not None:
            values[f"maj@{k}/mean"] = [_majority(scores[i], preds[i], k) for i in usable]
        summary |= {name: estimate(of_questions, num_used) for name, of_questions in values.items()}
    return summary


def sizes(n: int) -> list[int]:
    """2, 4, 8, ... and n."""
    return [2**i for i in range(1, n.bit_length()) if 2**i < n] + [n]


def _majority(scores: Sequence[float], preds: Sequence[str], k: int) -> float:
    """The mean, over ways to choose k of the samples in their order, of the score that the most frequent prediction has first."""
    if math.comb(len(scores), k) <= _MAX_CHOICES:
        choices = list(itertools.combinations(range(len(scores)), k))
    else:
        generator = np.random.default_rng(0)
        choices = [tuple(sorted(generator.choice(len(scores), k, replace=False))) for _ in range(_MAX_CHOICES)]
    winners = [Counter(preds[i] for i in choice).most_common(1)[0][0] for choice in choices]
    first = [next(i for i in choice if preds[i] == winner) for choice, winner in zip(choices, winners, strict=True)]
    return float(np.mean([scores[i] for i in first]))
