"""Scores of strings, chosen by the tag `data_source` of a row.

A rule is a function (solution_str, ground_truth) -> float, or a dict with "score". To add one, write a file here and
a line in `_RULES`, or decorate a function with `register_score`, or name any function in
`reward.custom_reward_function.path`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lockstep.errors import MissingReward
from lockstep.utils.reward_score import code, exact_match, gsm8k, math

Rule = Callable[[str, Any], float | dict[str, Any]]

__all__ = ["code", "default_compute_score", "exact_match", "gsm8k", "math", "register_score"]

_RULES: dict[str, Rule] = {
    "openai/gsm8k": gsm8k.compute_score,
    "lighteval/MATH": math.compute_score,
    "DigitalLearningGmbH/MATH-lighteval": math.compute_score,
    "HuggingFaceH4/MATH-500": math.compute_score,
    "lockstep/reverse": exact_match.compute_score,
    "openai_humaneval": code.compute_score,
    "openai/openai_humaneval": code.compute_score,
    "mbpp": code.compute_score,
    "google-research-datasets/mbpp": code.compute_score,
    "apps": code.compute_score,
    "codeparrot/apps": code.compute_score,
    "codecontests": code.compute_score,
    "code_contests": code.compute_score,
    "deepmind/code_contests": code.compute_score,
    "codeforces": code.compute_score,
    "taco": code.compute_score,
    "BAAI/TACO": code.compute_score,
}


def register_score(data_source: str) -> Callable[[Rule], Rule]:
    """Decorator: use the function for rows with this `data_source`, in place of the rule it may have had."""

    def register(rule: Rule) -> Rule:
        _RULES[data_source] = rule
        return rule

    return register


def _select_rm_score_fn(data_source: str) -> Rule:
    """The rule for a `data_source`. Raises MissingReward (a NotImplementedError) when there is none."""
    if data_source not in _RULES:
        raise MissingReward(
            f"no reward function for data_source {data_source!r}; known: {sorted(_RULES)}. "
            "Set reward.custom_reward_function.path to a Python file with "
            "compute_score(data_source, solution_str, ground_truth, extra_info), or use register_score"
        )
    return _RULES[data_source]


def default_compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None
) -> float | dict[str, Any]:
    """Score a response by the rule of its `data_source`. `extra_info` is accepted, as every compute_score must, and
    not used.
    """
    return _select_rm_score_fn(data_source)(solution_str, ground_truth)
