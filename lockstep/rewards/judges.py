"""Judges: choose who scores a row, and with what weight, by the row's tag.

```text
rule      the function of the row's data_source, or the user's compute_score
model     the reward model
sandbox   the row's test cases, run on the program in the response
NAME      a function of the user, named in reward.functions
```

The first of these that is present decides:

1. weights in the row, `reward_model: {"weights": {"rule": 1.0, "model": 0.2}}`;
2. weights of the data_source in `reward.weights`, or of "*", which stands for every other data_source;
3. `reward_model: {"style": "model"}`: the model; `{"test_cases": ...}`: the sandbox;
4. the rule of the data_source; without a rule, the reward model.
"""

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from lockstep.data.tag import Tag
from lockstep.errors import ConfigError, DataError, MissingReward
from lockstep.processes import function_name
from lockstep.rewards.graders import _select_rm_score_fn

RULE = "rule"
MODEL = "model"
SANDBOX = "sandbox"
JudgeWeights = Mapping[str, float]
_ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")


class BatchCall:
    """Makes a function of lists, (data_sources, solution_strs, ground_truths, extra_infos) -> a result for each row, callable by a
    `RewardRunner`: the score is 0.0, and "results" holds what the function returned."""

    def __init__(self, func: Callable[..., Any]) -> None:
        self.func = func

    def __call__(self, **lists: Any) -> dict[str, Any]:
        """Call the function for a batch."""
        results = self.func(**lists)
        if inspect.isawaitable(results):
            results = asyncio.run(_awaited(results))
        return {"score": 0.0, "results": list(results)}


class JudgeFunction(NamedTuple):
    """The function of a judge and its arguments."""

    function: Callable[..., Any]
    arguments: dict[str, str]
    """The function's argument -> the row's entry that it gets."""
    takes_sandbox: bool
    """Whether the function has an argument `sandbox`: it runs the response as a program."""
    takes_batch: bool
    """Whether the function is a `BatchCall`, called once when all responses of a batch are finished."""


class Judges:
    """Chooses judges by tag.

    Args:
        compute_score: The rule of every data_source; None: the built-in rules.
        functions: The user's judges, by name.
        weights: data_source (or "*") -> judge -> weight.

    Raise ConfigError for weights that name an unknown judge.
    """

    def __init__(
        self,
        compute_score: Callable[..., Any] | None = None,
        functions: Mapping[str, Callable[..., Any]] | None = None,
        weights: Mapping[str, JudgeWeights] | None = None,
    ) -> None:
        self._compute_score = compute_score
        self.functions = dict(functions or {})
        self._weights = dict(weights or {})
        for name in self.functions:
            if name in (RULE, MODEL, SANDBOX):
                raise ConfigError(f"reward.functions.{name}: that name is taken; choose another")
        for source, judges in self._weights.items():
            self._check_names(judges, f"reward.weights.{source}")

    def of(self, tag: Tag, has_model: bool) -> JudgeWeights:
        """Return judge -> weight for a row. Without a model, the model's weight is left out.

        Raise MissingReward if no judge can score the row, DataError if it lacks a data_source or ground truth that its judge needs,
        ConfigError if its weights name an unknown judge.
        """
        chosen = {judge: weight for judge, weight in self.explicit(tag).items() if has_model or judge != MODEL}
        if not chosen:
            if tag.style == MODEL and has_model:
                chosen = {MODEL: 1.0}
            elif tag.has_test_cases:
                chosen = {SANDBOX: 1.0}
            else:
                chosen = {MODEL if has_model and not self._has_rule(tag.data_source) else RULE: 1.0}
        if RULE in chosen and _is_built_in(self._rule(tag.data_source)) and not (tag.has_truth or tag.has_test_cases):
            raise DataError(
                f"rows of data_source {tag.data_source!r} have no reward_model.ground_truth, which its reward compares answers with: "
                'add it to the column reward_model, as {"ground_truth": ...}'
            )
        return chosen

    def explicit(self, tag: Tag) -> JudgeWeights:
        """Return the weights that the row or the configuration states; empty if neither does. Raise ConfigError as `of` does."""
        weights = dict(tag.weights)
        self._check_names(weights, f"reward_model.weights of a row with data_source {tag.data_source!r}")
        return weights or self._weights.get(tag.data_source or "*") or self._weights.get("*") or {}

    def function(self, judge: str, data_source: str | None) -> JudgeFunction:
        """Return the function of a judge other than the model.

        Raise MissingReward, DataError for a rule without a data_source, and ConfigError for a function with another required argument.
        """
        if judge == SANDBOX:
            from lockstep.judging import code

            function: Callable[..., Any] = code.compute_score
        elif judge == RULE:
            function = self._rule(data_source)
        else:
            function = self.functions[judge]
        parameters = _parameters(function)
        takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        takes_batch = "solution_strs" in parameters
        plural = "s" if takes_batch else ""
        given = {f"{name}{plural}": name for name in _ARGUMENTS}
        required = [p.name for p in parameters.values() if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
        strange = [name for name in required if name not in (*given, "sandbox")]
        if strange:
            raise ConfigError(_refusal(function, strange, given))
        arguments = {name: entry for name, entry in given.items() if takes_all or name in parameters}
        if judge == SANDBOX:
            arguments["ground_truth"] = "test_cases"
        return JudgeFunction(BatchCall(function) if takes_batch else function, arguments, "sandbox" in parameters, takes_batch)

    def _has_rule(self, data_source: str | None) -> bool:
        try:
            self._rule(data_source)
        except (MissingReward, DataError):
            return False
        return True

    def _rule(self, data_source: str | None) -> Callable[..., Any]:
        if self._compute_score is not None:
            return self._compute_score
        if data_source is None:
            raise DataError(
                "a row has no 'data_source', which chooses its reward function: add that column to "
                "data.train_files and data.val_files, or set reward.custom_reward_function.path"
            )
        return _select_rm_score_fn(data_source)

    def _check_names(self, weights: JudgeWeights, where: str) -> None:
        known = [RULE, MODEL, SANDBOX, *self.functions]
        for name in weights:
            if name not in known:
                raise ConfigError(f"{where} names the judge {name!r}; known: {', '.join(known)}. Add yours to reward.functions")


def _refusal(function: Callable[..., Any], strange: Sequence[str], given: Iterable[str]) -> str:
    """Return the message for a function whose required arguments `strange` are not among the `given` ones."""
    name = function_name(function)
    if "completions" in strange:
        return (
            f"the reward function {name} has TRL's arguments ({', '.join(strange)}). Here it is called with data_sources, solution_strs, "
            "ground_truths, extra_infos, and returns a list of numbers: name solution_strs instead of completions (a list of strings, no "
            "messages) and ground_truths or extra_infos instead of columns of the data; with solution_str it is called for one response"
        )
    return (
        f"the reward function {name} needs {', '.join(strange)}, which Lockstep does not give; it may name {', '.join(given)}, and "
        "others with a default or in reward.custom_reward_function.reward_kwargs"
    )


async def _awaited(results: Awaitable[Any]) -> Any:
    return await results


def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a function, which may be partial. Raise ConfigError for given arguments that it does not take."""
    try:
        return inspect.signature(function).parameters
    except ValueError:
        taken = list(inspect.signature(getattr(function, "func", function)).parameters)
        given = [name for name in getattr(function, "keywords", {}) if name not in taken]
        raise ConfigError(
            f"reward.custom_reward_function.reward_kwargs has {', '.join(given)}, which the reward function {function_name(function)} "
            f"does not take; it takes {', '.join(taken)}"
        ) from None


def _is_built_in(rule: Callable[..., Any]) -> bool:
    return str(getattr(rule, "__module__", "")).startswith("lockstep.rewards.graders")
