"""Scores of strings, chosen by the tag `data_source` of a row.

A rule is a function (solution_str, ground_truth) -> float, or a dict with "score". It may name more parameters, such as `extra_info`, and
gets the parameters that it names. To add a rule, write a file here and a line in `_RULES`, decorate a function with `register_score`, or
name your file in `reward.rules`. Rules for code and mathematics are in `lockstep.judging`, which is imported when a row needs one of them.
"""

import difflib
import fnmatch
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from lockstep.errors import MissingReward
from lockstep.rewards.graders import exact_match, gsm8k, multiple_choice, question

Rule = Callable[..., Any]
"""(solution_str=, ground_truth=, ...) -> a number, or a dict with "score"; sync or async."""

__all__ = ["default_compute_score", "exact_match", "gsm8k", "multiple_choice", "register_score"]

_CODE = (
    "openai_humaneval", "openai/openai_humaneval", "mbpp", "google-research-datasets/mbpp", "apps", "codeparrot/apps",
    "codecontests", "code_contests", "deepmind/code_contests", "codeforces", "taco", "BAAI/TACO",
)  # fmt: skip
_RULES: dict[str, Rule | str] = {
    "openai/gsm8k": gsm8k.compute_score,
    **dict.fromkeys(("lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500"), "math.compute_score"),
    **dict.fromkeys(("deepscaler*", "math-ai/*", "MATH-500"), "math.compute_score"),
    "numina_*": "competition.numina",
    **dict.fromkeys(("math", "math_dapo*", "aime*"), "competition.compute_score"),
    "searchR1_*": question.compute_score,
    "hiyouga/geometry3k": "geometry.compute_score",
    "Rowan/hellaswag": multiple_choice.compute_score,
    "lockstep/reverse": exact_match.compute_score,
    **dict.fromkeys(_CODE, "code.compute_score"),
}
"""data_source, or its beginning and a * -> rule. A text names a rule of `lockstep.judging`: module.function."""


def register_score(data_source: str) -> Callable[[Rule], Rule]:
    """Decorator: use the function for rows with this `data_source`, instead of the built-in rule."""

    def register(rule: Rule) -> Rule:
        _RULES[data_source] = rule
        return rule

    return register


def _select_rm_score_fn(data_source: str) -> Rule:
    """Return the rule for a `data_source`.

    Raise MissingReward (a NotImplementedError) if there is none, and MissingExtra if it needs a package that is not installed.
    """
    known: str | None = data_source
    if data_source not in _RULES:
        known = next((name for name in _RULES if fnmatch.fnmatchcase(str(data_source), name)), None)
    if known is None:
        near = difflib.get_close_matches(str(data_source), _RULES, n=1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise MissingReward(
            f"no reward function for data_source {data_source!r}{hint}; known: {sorted(_RULES)}. Name one for it in reward.rules as "
            "file.py:function, or one for all rows in reward.custom_reward_function.path, or use register_score"
        )
    rule = _RULES[known]
    return _from_judging(rule) if isinstance(rule, str) else rule


def _from_judging(rule: str) -> Rule:
    """Return the rule of `lockstep.judging` that `rule` names; raise MissingExtra if it needs a package that is not installed."""
    from lockstep import judging

    module_name, _, function = rule.partition(".")
    if module_name != "code":
        judging.math.check()
    found: Rule = getattr(getattr(judging, module_name), function)
    return found


def default_compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any] | None = None, **kwargs: Any
) -> Any:
    """Score a response by the rule of its `data_source`. The rule also gets the arguments among `data_source`, `extra_info` and `kwargs`
    that its signature names.
    """
    rule = _select_rm_score_fn(data_source)
    offered = {"data_source": data_source, "extra_info": extra_info, **kwargs}
    return rule(solution_str=solution_str, ground_truth=ground_truth, **_named_by(rule, offered))


def _named_by(rule: Rule, offered: Mapping[str, Any]) -> dict[str, Any]:
    """Return the offered arguments that the rule's signature names; all of them if it takes **keywords."""
    parameters = inspect.signature(rule).parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return {name: value for name, value in offered.items() if takes_all or name in parameters}
