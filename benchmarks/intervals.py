"""Do the 95 % intervals of lockstep/observability/statistics.py cover the truth 95 times in 100, and do paired tests cry wolf 5 times?

    PYTHONPATH=. python benchmarks/intervals.py --out benchmarks/results/intervals.json

Questions differ in difficulty: the probability of a right answer is beta distributed around the model's accuracy, which is drawn anew in
every simulation (uniform, 0.05 to 0.95). `correlation` is that of two samples of one question. The truth is the accuracy on the population
that questions are drawn from; for differences it is 0: both models have the same probabilities.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.observability.statistics import (
    clustered_interval,
    flip_test,
    mcnemar,
    paired_interval,
    t_interval,
    wilson_interval,
)

QUESTIONS = (30, 164, 500, 1319)
"""AIME, HumanEval, MATH-500, GSM8K."""
_BLOCK = 250


def simulate(num_simulations: int, questions: tuple[int, ...] = QUESTIONS, seed: int = 0) -> Iterator[dict[str, Any]]:
    """One row per case: the kind of number, its setting, and the share of simulations whose interval covered or whose test alarmed."""
    for num_questions in questions:
        for correlation in (0.2, 0.7):
            for num_samples in (1, 4, 16):
                rng = np.random.default_rng((seed, num_questions, int(10 * correlation), num_samples))
                case = {"questions": num_questions, "samples": num_samples, "correlation": correlation}
                found: dict[str, list[Any]] = {}
                for start in range(0, num_simulations, _BLOCK):
                    size = min(_BLOCK, num_simulations - start)
                    for kind, hits in _block(rng, size, num_questions, num_samples, correlation).items():
                        found.setdefault(kind, []).append(hits)
                for kind, hits in found.items():
                    yield {"what": kind, **case, "share": round(float(np.concatenate(hits).mean()), 4)}


def _block(rng: np.random.Generator, size: int, num_questions: int, num_samples: int, correlation: float) -> dict[str, Any]:
    """What -> whether each of `size` simulations covered, or alarmed."""
    accuracy = rng.uniform(0.05, 0.95, (size, 1))
    spread = (1 - correlation) / correlation
    chances = rng.beta(accuracy * spread, (1 - accuracy) * spread, (size, num_questions))
    right = rng.binomial(num_samples, chances)
    others = rng.binomial(num_samples, chances) / num_samples
    means, truth = right / num_samples, accuracy[:, 0]
    differences = means - others
    is_single = num_samples == 1
    paired = paired_interval(differences, is_single)
    if is_single:
        ends = np.array([wilson_interval(int(count), num_questions) for count in right.sum(1)]).T
        alarms = [
            mcnemar(int(better), int(worse)) < 0.05 for better, worse in zip((differences > 0).sum(1), (differences < 0).sum(1))
        ]
        return {
            "mean@1": _covers(ends, truth),
            "difference@1": _covers(paired, 0),
            "false alarm@1": np.array(alarms),
        }
    k = num_samples // 2
    best = 1 - _none_of(num_samples - right, num_samples, k)
    a, b = accuracy * spread, (1 - accuracy) * spread
    all_wrong = np.prod([(b + i) / (a + b + i) for i in range(k)], axis=0)[:, 0]
    rewards = means * 3 - 1 + rng.normal(0, 0.2, means.shape)  # no shares: beyond 0 and 1
    return {
        f"mean@{num_samples}": _covers(clustered_interval(means, num_questions * num_samples), truth),
        f"pass@{k} of {num_samples}": _covers(clustered_interval(best, num_questions * num_samples / k), 1 - all_wrong),
        f"reward@{num_samples}": _covers(t_interval(rewards), truth * 3 - 1),
        f"difference@{num_samples}": _covers(paired, 0),
        f"false alarm@{num_samples}": flip_test(differences) < 0.05,
    }


def _none_of(wrong: Any, num_samples: int, k: int) -> Any:
    """C(wrong, k) / C(all, k)."""
    return np.prod([np.maximum(wrong - i, 0) / (num_samples - i) for i in range(k)], axis=0)


def _covers(ends: Any, truth: Any) -> Any:
    return (ends[0] <= truth) & (truth <= ends[1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--simulations", type=int, default=10_000)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows = []
    for row in simulate(options.simulations):
        rows.append(row)
        print(json.dumps(row), flush=True)
    if options.out:
        lines = ",\n  ".join(map(json.dumps, rows))
        options.out.write_text(f'{{"simulations": {options.simulations}, "rows": [\n  {lines}\n]}}\n')
    return 0


if __name__ == "__main__":
    sys.exit(main())
