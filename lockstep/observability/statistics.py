"""How sure a measured number is: 95 % intervals and paired tests that know that samples of one question belong together.

```text
one sample per question, right or wrong     Wilson's interval of a share
several samples, right or wrong             Wilson's interval with the sample size that the spread between questions leaves
any other scores                            the same over the range that the scores have, and no narrower than Student's t
two models on the same questions            the difference per question: Tango's interval for one sample each, else Student's t;
                                            the p-value flips signs (for one sample each that is McNemar's exact test)
```

Functions that take arrays take any number of leading axes, so that `benchmarks/intervals.py` can simulate with the code that is used.
"""

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
_ALIKE = 0.5
"""Questions of equal samples that are counted beside the measured ones. benchmarks/intervals.py: with none, 16 samples of 30 questions of
which 1 to 5 % are right are covered 88 times in 100; with 1, those of an accuracy between 0.05 and 0.95 more than 96 times."""
_TIE = 1e-3
"""Sums of differences, of which the largest is 1, that are nearer than this are equal: float32 adds thousands of them up to 1e-4."""

Array = NDArray[np.float64]
Interval = tuple[float, float]


@dataclass(frozen=True)
class Estimate:
    """A measured number and where the true one is with 95 % confidence; no interval where the data cannot say."""

    value: float
    interval: Interval | None

    def __str__(self) -> str:
        return f"{self.value:.3f}" + ("" if self.interval is None else " [{:.3f}, {:.3f}]".format(*self.interval))


@dataclass(frozen=True)
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


def estimate(values: Sequence[float], num_samples: int | None) -> Estimate:
    """The mean of `values`, one per question, which `num_samples` samples of score 0 or 1 are behind; None: of other scores. No interval
    for one question that was asked more than once, nor for other scores that are all the same."""
    array = np.array(values, dtype=np.float64)
    value = float(array.mean())
    if num_samples is not None and num_samples <= len(array):
        return Estimate(value, wilson_interval(float(array.sum()), len(array)))
    if len(array) < 2 or (num_samples is None and array.min() == array.max()):
        return Estimate(value, None)
    low, high = ranged_interval(array) if num_samples is None else clustered_interval(array, num_samples)
    return Estimate(value, (float(low), float(high)))


def clustered_interval(values: Array, num_samples: int) -> tuple[Array, Array]:
    """The ends of the 95 % interval of the mean of `values` [..., questions], which `num_samples` samples of score 0 or 1 are behind.

    Wilson's with the number of independent trials that would have the same standard error (Dean, Pagano 2015): at least one per question,
    which is what right and wrong alone would be, and at most `num_samples`. How many that are is read off the spread between questions,
    and near 0 or 1 few questions say something about it; so half a question whose samples are all alike is counted with them. Two questions
    or more.
    """
    return _clustered(values, num_samples, Z_95)


def _clustered(values: Array, num_samples: float, quantile: float) -> tuple[Array, Array]:
    num_questions = values.shape[-1]
    share = values.mean(-1)
    variance = values.var(-1, ddof=1)
    most = share * (1 - share)
    spread = np.where(most > 0, variance / np.where(most > 0, most, 1), 1.0)  # 1: all samples of a question are alike
    spread = np.maximum(spread, num_questions / max(num_samples, num_questions))
    weight = 4 * num_questions * most
    spread = np.minimum((weight * spread * (quantile / Z_95) ** 2 + _ALIKE) / (weight + _ALIKE), 1.0)
    return _wilson(share, Z_95**2 * spread / num_questions)


def ranged_interval(values: Array) -> tuple[Array, Array]:
    """The ends of the 95 % interval of the mean of `values` [..., questions] on any scale, not all of them equal.

    As `clustered_interval` on the scale from the least to the largest value, which moves it to where the long tail is, and at least as
    wide as Student's. Student's alone covers the mean of 30 skewed scores 93 times in 100.
    """
    least = values.min(-1)
    span = np.ptp(values, -1)
    scaled = (values - least[..., None]) / span[..., None]
    low, high = _clustered(scaled, math.inf, t_95(values.shape[-1] - 1))
    students = t_interval(scaled)
    centre = (low + high) / 2
    half = np.maximum(high - low, students[1] - students[0]) / 2
    return least + span * (centre - half), least + span * (centre + half)


def t_interval(values: Array) -> tuple[Array, Array]:
    """The ends of the 95 % interval of the mean of `values` [..., questions] by Student's t; two questions or more."""
    count = values.shape[-1]
    half = t_95(count - 1) * values.std(-1, ddof=1) / math.sqrt(count)
    return values.mean(-1) - half, values.mean(-1) + half


def compare(new: Sequence[Sequence[float]], old: Sequence[Sequence[float]]) -> Difference:
    """The mean of `new` less that of `old`, question by question: scores of the same questions in the same order, two or more of them.
    With several samples each, no interval where the differences are all equal."""
    differences = np.array([np.mean(a) - np.mean(b) for a, b in zip(new, old, strict=True)])
    is_single = all(len(of_one) == 1 for of_one in (*new, *old)) and bool(np.isin(differences, (-1.0, 0.0, 1.0)).all())
    interval = None
    if (
        is_single or np.ptp(differences) > 0
    ):  # of differences that are all equal Student's interval is that point, however few they are
        low, high = paired_interval(differences, is_single)
        interval = float(low), float(high)
    better = int((differences > 0).sum())
    worse = int((differences < 0).sum())
    p_value = mcnemar(better, worse) if is_single else float(flip_test(differences))
    return Difference(Estimate(float(differences.mean()), interval), p_value, len(differences), better, worse)


def paired_interval(differences: Array, is_single: bool) -> tuple[Array, Array]:
    """The ends of the 95 % interval of the mean of `differences` [..., questions].

    `is_single`: each is -1, 0 or 1. Then it is Tango's (1998): the differences that the score test does not reject. With few questions on
    which the models differ, Student's is too narrow, or has no width at all.
    """
    if not is_single:
        return t_interval(differences)
    count = differences.shape[-1]
    better = (differences > 0).sum(-1)
    worse = (differences < 0).sum(-1)
    low = _score_end(worse, better, count)
    return -low, _score_end(better, worse, count)


def _score_end(better: Array, worse: Array, count: int) -> Array:
    """The largest difference that is not rejected, by halving."""
    inside = (better - worse) / count
    outside = np.ones(np.shape(better))
    for _ in range(50):
        middle = (inside + outside) / 2
        # The likeliest probability that the other model alone is right, if the difference is `middle`: the root of a quadratic.
        b = -better - worse + (2 * count - better + worse) * middle
        only_worse = (np.sqrt(b**2 + 8 * count * worse * middle * (1 - middle)) - b) / (4 * count)
        variance = count * (2 * only_worse + middle * (1 - middle))
        is_inside = (count * middle - better + worse) ** 2 <= Z_95**2 * variance
        inside = np.where(is_inside, middle, inside)
        outside = np.where(is_inside, outside, middle)
    return inside


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
    z = Z_95
    v = freedom
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
