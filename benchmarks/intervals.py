"""Do the 95 % intervals of lockstep/observability/statistics.py cover the truth 95 times in 100, and do paired tests cry wolf 5 times?

    PYTHONPATH=. python benchmarks/intervals.py --out benchmarks/results/intervals.json

Questions differ in difficulty: the probability of a right answer is beta distributed around the model's accuracy; `correlation` is that of
two samples of one question. The truth is the number on the population that questions are drawn from. It is drawn anew in every simulation:
uniform, 0.05 to 0.95, for each number by itself, since pass@8 is near 1 where accuracy is not. `extreme` rows draw it from what is
nearer to 0 or 1 than 0.05, down to 0.005. A wrong sample gives one of three wrong answers, which majorities count. Differences are of two
models with the same probabilities, or (`better`) of one that turns a tenth of its wrong answers into right ones. An interval that cannot be
given, since all rewards are equal, counts as one that misses.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.observability.statistics import (
    clustered_interval,
    flip_test,
    mcnemar,
    paired_interval,
    ranged_interval,
    wilson_interval,
)

QUESTIONS = (30, 164, 500, 1319)
"""AIME, HumanEval, MATH-500, GSM8K."""
_BLOCK = 250
_NUM_ANSWERS = 4
"""Answers that a question can get, the first of them right."""
_OF = 8
"""Samples behind a majority."""
Array = NDArray[np.float64]
Found = dict[str, Any]
"""What -> whether each simulation covered, or alarmed."""


def simulate(num_simulations: int, questions: tuple[int, ...] = QUESTIONS, seed: int = 0) -> Iterator[dict[str, Any]]:
    """One row per case: the kind of number, its setting, and the share of simulations whose interval covered or whose test alarmed."""
    kinds: list[tuple[Callable[..., Found], tuple[int, ...]]] = [
        (shares, (1, 4, 16)), (rewards, (1, 4, 16)), (differences, (1, 4, 16)), (majorities, (_OF,)),
    ]  # fmt: skip
    for num_questions in questions:
        for correlation in (0.2, 0.7):
            for kind, samples in kinds:
                for num_samples in samples:
                    rng = np.random.default_rng((seed, num_questions, int(10 * correlation), num_samples))
                    case = {"questions": num_questions, "samples": num_samples, "correlation": correlation}
                    yield from _rows(kind, rng, num_simulations, case)
        rng = np.random.default_rng((seed, num_questions))
        yield from _rows(scales, rng, num_simulations, {"questions": num_questions, "samples": 1, "correlation": None})


def _rows(kind: Callable[..., Found], rng: np.random.Generator, count: int, case: dict[str, Any]) -> Iterator[dict[str, Any]]:
    found: dict[str, list[Any]] = {}
    for start in range(0, count, _BLOCK):
        for what, hits in kind(rng, min(_BLOCK, count - start), *case.values()).items():
            found.setdefault(what, []).append(hits)
    for what, parts in found.items():
        yield {"what": what, **case, "share": round(float(np.concatenate(parts).mean()), 4)}


def shares(rng: np.random.Generator, size: int, num_questions: int, num_samples: int, correlation: float) -> Found:
    """mean@n, and for several samples pass@k of them."""
    found = {}
    for note, truth in (("", rng.uniform(0.05, 0.95, size)), (", extreme", _extreme(rng, size))):
        right = rng.binomial(num_samples, chances_of(rng, truth, num_questions, correlation))
        if num_samples == 1:
            ends = np.array([wilson_interval(int(count), num_questions) for count in right.sum(1)]).T
        else:
            ends = clustered_interval(right / num_samples, num_questions * num_samples)
        found[f"mean@{num_samples}{note}"] = _covers(ends, truth)
        if (k := num_samples // 2) > 0:
            accuracy = accuracy_of(truth, passes(k), correlation)
            right = rng.binomial(num_samples, chances_of(rng, accuracy, num_questions, correlation))
            best = 1 - _none_of(num_samples - right, num_samples, k)
            ends = clustered_interval(best, num_questions * num_samples)
            found[f"pass@{k} of {num_samples}{note}"] = _covers(ends, truth)
    return found


def rewards(rng: np.random.Generator, size: int, num_questions: int, num_samples: int, correlation: float) -> Found:
    """The mean of rewards that are no shares: -1 for a wrong and 1 for a right sample; and about -1 and 2, with noise."""
    accuracy = rng.uniform(0.05, 0.95, size)
    means = rng.binomial(num_samples, chances_of(rng, accuracy, num_questions, correlation)) / num_samples
    noisy = means * 3 - 1 + rng.normal(0, 0.2, means.shape)
    with np.errstate(invalid="ignore"):  # all are equal
        return {
            f"reward@{num_samples} of -1 and 1": _covers(ranged_interval(2 * means - 1), 2 * accuracy - 1),
            f"reward@{num_samples} of -1 and 2 with noise": _covers(ranged_interval(noisy), 3 * accuracy - 1),
        }


def scales(rng: np.random.Generator, size: int, num_questions: int, *case: Any) -> Found:
    """The mean of rewards of other forms."""
    form = size, num_questions
    drawn = {
        "normal": (rng.normal(0, 1, form), 0.0),
        "heavy tails on both sides (t, 3 degrees)": (rng.standard_t(3, form), 0.0),
        "cut lengths": (-np.minimum(rng.exponential(1, form), 2), math.exp(-2) - 1),
        "exponential": (rng.exponential(1, form), 1.0),
        "log-normal": (rng.lognormal(0, 1, form), math.exp(0.5)),
        "0.4 to 0.6": (rng.uniform(0.4, 0.6, form), 0.5),
        "beta, 2 and 6": (rng.beta(2, 6, form), 0.25),
        "0, 0.2 and 1": (rng.choice([0, 0.2, 1], form, p=[0.5, 0.3, 0.2]), 0.26),
    }
    return {f"reward, {name}": _covers(ranged_interval(values), truth) for name, (values, truth) in drawn.items()}


def differences(rng: np.random.Generator, size: int, num_questions: int, num_samples: int, correlation: float) -> Found:
    """Two models on the same questions."""
    accuracy = rng.uniform(0.05, 0.95, size)
    chances = chances_of(rng, accuracy, num_questions, correlation)
    first, second = (rng.binomial(num_samples, chances) / num_samples for _ in range(2))
    better = rng.binomial(num_samples, chances + (1 - chances) / 10) / num_samples
    is_single, same = num_samples == 1, first - second
    if is_single:
        alarms = [mcnemar(int(a), int(b)) < 0.05 for a, b in zip((same > 0).sum(1), (same < 0).sum(1))]
    else:
        alarms = flip_test(same) < 0.05
    return {
        f"difference@{num_samples}": _covers(paired_interval(same, is_single), 0.0),
        f"difference@{num_samples}, better": _covers(paired_interval(better - first, is_single), (1 - accuracy) / 10),
        f"false alarm@{num_samples}": np.array(alarms),
    }


def majorities(rng: np.random.Generator, size: int, num_questions: int, num_samples: int, correlation: float) -> Found:
    """The majority of all samples, and of half of them."""
    found = {}
    for k in (num_samples, num_samples // 2):
        for note, truth in (("", rng.uniform(0.05, 0.95, size)), (", extreme", _extreme(rng, size))):
            chances = chances_of(rng, accuracy_of(truth, wins(k), correlation), num_questions, correlation)[..., None]
            answers = rng.integers(1, _NUM_ANSWERS, (size, num_questions, num_samples))
            answers[rng.random(answers.shape) < chances] = 0
            values = majority_table(num_samples, k)[answers @ _NUM_ANSWERS ** np.arange(num_samples)]
            ends = clustered_interval(values, num_questions * num_samples)
            found[f"majority@{k} of {num_samples}{note}"] = _covers(ends, truth)
    return found


# -- the truth --------------------------------------------------------------------------------------------------------------------------


def chances_of(rng: np.random.Generator, accuracy: Array, num_questions: int, correlation: float) -> Array:
    """Of each question [simulations, questions] the probability of a right sample, for an accuracy [simulations]."""
    spread = (1 - correlation) / correlation
    return rng.beta(accuracy[:, None] * spread, (1 - accuracy[:, None]) * spread, (len(accuracy), num_questions))


def passes(k: int) -> Array:
    """[k + 1]: what k samples come to of which so many are right, for pass@k."""
    return (np.arange(k + 1) > 0).astype(np.float64)


def wins(k: int) -> Array:
    """[k + 1]: the same for majority@k: of equally many answers each is the first as often."""
    won = np.zeros(k + 1)
    for counts in itertools.product(range(k + 1), repeat=_NUM_ANSWERS):
        if sum(counts) == k and counts[0] == max(counts):
            wrong = k - counts[0]
            ways = math.factorial(wrong) / math.prod(map(math.factorial, counts[1:])) / (_NUM_ANSWERS - 1) ** wrong
            won[counts[0]] += ways / counts.count(counts[0])
    return won


def expected(accuracy: Array, won: Array, correlation: float) -> Array:
    """What k samples of a question come to on average over the population, for each accuracy."""
    k, spread = len(won) - 1, (1 - correlation) / correlation
    a, b = accuracy * spread, (1 - accuracy) * spread
    terms = [math.comb(k, right) * won[right] * _rising(a, right) * _rising(b, k - right) for right in range(k + 1)]
    return np.sum(terms, axis=0) / _rising(np.array(spread), k)


def _rising(start: Array, count: int) -> Array:
    """start (start + 1) ..., `count` of them."""
    return np.prod([np.ones_like(start), *(start + i for i in range(count))], axis=0)


def accuracy_of(truth: Array, won: Array, correlation: float) -> Array:
    """The accuracies at which that comes to `truth`."""
    low, high = np.zeros_like(truth), np.ones_like(truth)
    for _ in range(50):
        middle = (low + high) / 2
        is_low = expected(middle, won, correlation) < truth
        low, high = np.where(is_low, middle, low), np.where(is_low, high, middle)
    return (low + high) / 2


_tables: dict[tuple[int, int], Array] = {}


def majority_table(num_samples: int, k: int) -> Array:
    """majority@k of every sequence of answers, by the number that the answers are digits of, the first sample last."""
    if (num_samples, k) not in _tables:
        codes = np.arange(_NUM_ANSWERS**num_samples)
        answers = codes[:, None] // _NUM_ANSWERS ** np.arange(num_samples) % _NUM_ANSWERS
        chosen = list(itertools.combinations(range(num_samples), k))
        total = np.zeros(len(codes))
        for choice in chosen:
            is_answer = answers[:, choice, None] == np.arange(_NUM_ANSWERS)
            # The most frequent, and of those the one that comes first.
            total += (is_answer.sum(1) * num_samples - is_answer.argmax(1)).argmax(1) == 0
        _tables[num_samples, k] = total / len(chosen)
    return _tables[num_samples, k]


def _extreme(rng: np.random.Generator, size: int) -> Array:
    near = rng.uniform(0.005, 0.05, size)
    return np.where(rng.random(size) < 0.5, near, 1 - near)


def _none_of(wrong: Any, num_samples: int, k: int) -> Any:
    """C(wrong, k) / C(all, k)."""
    return np.prod([np.maximum(wrong - i, 0) / (num_samples - i) for i in range(k)], axis=0)


def _covers(ends: Any, truth: Any) -> Any:
    return (ends[0] <= truth) & (truth <= ends[1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--simulations", type=int, default=10_000)
    parser.add_argument("--questions", type=int, nargs="+", default=QUESTIONS)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows = []
    for row in simulate(options.simulations, tuple(options.questions)):
        rows.append(row)
        print(json.dumps(row), flush=True)
    if options.out:
        lines = ",\n  ".join(map(json.dumps, rows))
        options.out.write_text(f'{{"simulations": {options.simulations}, "rows": [\n  {lines}\n]}}\n')
    return 0


if __name__ == "__main__":
    sys.exit(main())
