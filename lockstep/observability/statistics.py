"""How sure a measured number is: 95 % intervals and paired tests that know that samples of one question belong together.

```text
one sample per question, right or wrong     Wilson's interval of a share
several samples, scores within 0 and 1      Wilson's interval with the sample size that the spread between questions leaves
any other scores                            t interval over the means of questions
two models on the same questions            the difference per question: Bonett and Price's interval for one sample each, else t;
                                            the p-value flips signs (for one sample each that is McNemar's exact test)
```

Functions that take arrays take any number of leading axes, so that `benchmarks/intervals.py` can simulate with the code that is used.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Z_95 = 1.959964
"""A normal variable lies within so many standard deviations with probability 0.95."""
_NUM_FLIPS = 10_000
"""Draws behind a p-value that is not computed exactly: 0.05 is then known to 0.004."""
_TIE = 1e-3
"""Sums of differences, of which the largest is 1, that are nearer than this are equal: float32 adds thousands of them up to 1e-4."""

Array = NDArray[np.float64]
Interval = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Estimate:
    """A measured number and where the true one is with 95 % confidence; no interval where the data cannot say."""

    value: float
    interval: Interval | None

    def __str__(self) -> str:
        return f"{self.value:.3f}" + ("" if self.interval is None else " [{:.3f}, {:.3f}]".format(*self.interval))


@dataclass(frozen=True, slots=True)
class Difference:
    """How much better one model is than another on the questions that both answered."""

    estimate: Estimate
    p_value: float
    """The probability of a difference at least as large if both were the same."""
    num_questions: int
    num_better: int
    num_worse: int


def wilson_interval(right: float, count: float) -> Interval:
    """The 95 % interval (Wilson, 1927) of a probability of which `right` of `count` trials came out; (0, 1) without trials.

    Unlike mean +- 1.96 standard errors it stays within 0 and 1, and has a width where all or none came out.
    """
    if not count:
        return 0.0, 1.0
    low, high = _wilson(np.asarray(right / count), np.asarray(Z_95**2 / count))
    return float(low), float(high)


def estimate(values: Sequence[float], num_trials: float) -> Estimate:
    """The mean of `values`, one per question, which `num_trials` trials are behind: all samples for a mean over samples, a k-th of them for
    what is made of k samples. No interval for one question, nor for scores beyond 0 and 1 that are all the same."""
    array = np.array(values, dtype=np.float64)
    value = float(array.mean())
    if num_trials <= len(array) and np.isin(array, (0.0, 1.0)).all():
        return Estimate(value, wilson_interval(float(array.sum()), len(array)))
    if len(array) < 2:
        return Estimate(value, None)
    if array.min() >= 0 and array.max() <= 1:
        low, high = clustered_interval(array, num_trials)
    elif array.min() == array.max():
        return Estimate(value, None)
    else:
        low, high = t_interval(array)
    return Estimate(value, (float(low), float(high)))


def clustered_interval(values: Array, num_trials: float) -> tuple[Array, Array]:
    """The ends of the 95 % interval of the mean of `values` [..., questions], which lie within 0 and 1 (two questions or more).

    Wilson's with the number of independent trials that would have the same standard error (Dean and Pagano, 2015), at most `num_trials`,
    for the t distribution (Korn and Graubard, 1998). Where all questions are equal, and the spread says nothing, each is one trial, as if
    it had one sample.
    """
    num_questions = values.shape[-1]
    share, variance = values.mean(-1), values.var(-1, ddof=1) / num_questions
    trials = np.minimum(share * (1 - share) / np.where(variance > 0, variance, 1), max(num_trials, num_questions))
    return _wilson(share, np.where(variance > 0, t_95(num_questions - 1) ** 2 / np.maximum(trials, 1), Z_95**2 / num_questions))


def t_interval(values: Array) -> tuple[Array, Array]:
    """The ends of the 95 % interval of the mean of `values` [..., questions] by Student's t; two questions or more."""
    count = values.shape[-1]
    half = t_95(count - 1) * values.std(-1, ddof=1) / math.sqrt(count)
    return values.mean(-1) - half, values.mean(-1) + half


def compare(new: Sequence[Sequence[float]], old: Sequence[Sequence[float]]) -> Difference:
    """The mean of `new` less that of `old`, question by question: scores of the same questions in the same order, two or more of them."""
    differences = np.array([np.mean(a) - np.mean(b) for a, b in zip(new, old, strict=True)])
    is_single = all(len(of_one) == 1 for of_one in (*new, *old)) and bool(np.isin(differences, (-1.0, 0.0, 1.0)).all())
    low, high = paired_interval(differences, is_single)
    better, worse = int((differences > 0).sum()), int((differences < 0).sum())
    p_value = mcnemar(better, worse) if is_single else float(flip_test(differences))
    return Difference(Estimate(float(differences.mean()), (float(low), float(high))), p_value, len(differences), better, worse)


def paired_interval(differences: Array, is_single: bool) -> tuple[Array, Array]:
    """The ends of the 95 % interval of the mean of `differences` [..., questions].

    `is_single`: each is -1, 0 or 1. Then one question more is counted for either model (Bonett and Price, 2012): with few questions on
    which they differ, the t interval is too narrow.
    """
    if not is_single:
        return t_interval(differences)
    count = differences.shape[-1] + 2
    better, worse = ((differences > 0).sum(-1) + 1) / count, ((differences < 0).sum(-1) + 1) / count
    half = Z_95 * np.sqrt((better + worse - (better - worse) ** 2) / count)
    return np.maximum(better - worse - half, -1.0), np.minimum(better - worse + half, 1.0)


@functools.cache
def mcnemar(better: int, worse: int) -> float:
    """The exact p-value, two-sided, of so many questions for either model: a fair coin's probability of a split at least as uneven."""
    differing = better + worse
    tail = sum(math.comb(differing, i) for i in range(min(better, worse) + 1))
    return min(1.0, tail / 2 ** (differing - 1)) if differing else 1.0


def flip_test(differences: Array, seed: int = 0) -> Array:
    """The p-values, two-sided, of a mean of `differences` [..., questions] at least as far from 0 if either sign were as likely.

    By 10,000 draws of all signs, from `seed` alone.
    """
    scaled = differences / np.maximum(np.abs(differences).max(), 1e-300)
    signs = np.random.default_rng(seed).integers(0, 2, (differences.shape[-1], _NUM_FLIPS), dtype=np.int8).astype(np.float32)
    drawn = np.abs(scaled.astype(np.float32) @ (2 * signs - 1))
    return (1 + (drawn >= np.abs(scaled.sum(-1))[..., None] - _TIE).sum(-1)) / (1 + _NUM_FLIPS)


def expected_best(scores: Sequence[float], k: int) -> float:
    """The mean of the largest of k scores over all subsets of size k. In order, score i (from 0) is the largest of C(i, k-1) of them.

    Of scores 0 and 1 it is pass@k, without bias: 1 - C(wrong, k) / C(all, k).
    """
    total = math.comb(len(scores), k)
    return sum(score * math.comb(i, k - 1) / total for i, score in enumerate(sorted(scores)))


def t_95(freedom: int) -> float:
    """The 0.975 quantile of Student's t: exact for 1 and 2 degrees of freedom, else Cornish and Fisher's series, right to 0.001."""
    if freedom < 3:
        return (12.7062, 4.3027)[freedom - 1]
    z, v = Z_95, freedom
    return (
        z
        + (z**3 + z) / (4 * v)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * v**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * v**3)
        + (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / (92160 * v**4)
    )


def _wilson(share: Array, square: Array) -> tuple[Array, Array]:
    """`square`: the squared quantile over the number of trials."""
    centre = (share + square / 2) / (1 + square)
    half = np.sqrt(share * (1 - share) * square + square**2 / 4) / (1 + square)
    return np.maximum(centre - half, 0.0), np.minimum(centre + half, 1.0)
