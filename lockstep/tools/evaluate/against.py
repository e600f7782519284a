"""Whether two results can be compared: who judged each question, how it was asked, how answers were drawn.

Another judge, or other settings of it, is an error: the difference would be of the judges. What may be what is compared, or changes
nothing, is only said: the code of the same function, the template, the sampling.
"""

import functools
import inspect
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lockstep.config.identity import redacted
from lockstep.errors import ConfigError, DataError
from lockstep.rewards.judges import MODEL
from lockstep.rewards.manager import RewardManager
from lockstep.tools.evaluate.question import Question, digest
from lockstep.tools.evaluate.results import placed

Judge = dict[str, dict[str, Any]]
"""Name of a judge -> weight, function (file.py:name), settings, and a hash of the code of its file."""


def judges_of(questions: Sequence[Question], manager: RewardManager, sandbox: Mapping[str, Any]) -> list[Judge]:
    """Who judges each question; `sandbox` are the settings of what runs programs."""

    @functools.cache
    def of(tag: Any) -> Judge:
        return {
            name: _judge(manager, name, weight, tag.data_source, sandbox) for name, weight in manager.judges_of(tag, False).items()
        }

    return [of(question.tag) for question in questions]


def check_against(
    earlier: Mapping[str, Any],
    questions: Sequence[Question],
    judges: Sequence[Judge],
    template: Mapping[str, Any],
    drawing: Mapping[str, Any],
) -> list[str]:
    """What differs from an earlier result besides the model, in words.

    Raises DataError where fewer than two questions are in both, ConfigError where they had another judge.
    """
    old = {
        place: earlier["questions"][i].get("judge") for place, i in placed((e["source"], e["hash"]) for e in earlier["questions"])
    }
    common = [(place, i) for place, i in placed((q.source, q.hash) for q in questions) if place in old]
    if len(common) < 2:
        raise DataError(
            f"--against: {len(common)} of the {len(questions)} questions are in the earlier result; it was of other data, and a "
            "comparison needs two"
        )
    pairs = Counter((old[place], digest(judges[i])) for place, i in common) if judges else Counter()
    now = {digest(judge): judge for judge in judges}
    found = []
    for (before, after), count in pairs.items():
        if before not in earlier.get("judges", {}):
            found.append(f"the earlier result does not say who judged {count} of {len(common)} questions")
        elif before != after:
            found += _compared(earlier["judges"][before], now[after], f"{count} of {len(common)} questions")
    found += _template_differences(earlier.get("template", {}), template)
    was = earlier.get("sampling", {})
    names = [name for name, value in drawing.items() if name != "seed" and name in was and was[name] != _as_json(value)]
    return found + [f"{name} {was[name]} before, {drawing[name]} now" for name in names]


def _judge(manager: RewardManager, name: str, weight: float, source: str | None, sandbox: Mapping[str, Any]) -> dict[str, Any]:
    if name == MODEL:
        return {"weight": weight}
    found = manager.function(name, source)
    function = found.function
    settings = dict(sandbox) if found.takes_sandbox else {}
    while hasattr(function, "func"):  # a function of lists, or one with some of its arguments
        settings |= getattr(function, "keywords", {})
        function = function.func
    file = _file(function)
    return {
        "weight": weight,
        "function": f"{file.name if file else '?'}:{getattr(function, '__name__', type(function).__name__)}",
        "settings": redacted(_as_json(settings)),
        "code": digest(file.read_bytes()) if file else None,
    }


def _file(function: Callable[..., Any]) -> Path | None:
    try:
        name = inspect.getsourcefile(function if hasattr(function, "__code__") else type(function))
    except TypeError:
        return None
    return Path(name) if name and Path(name).is_file() else None


def _compared(before: Judge, after: Judge, which: str) -> list[str]:
    """What differs in a judge. Raises ConfigError where it is another one.

    A file may have moved, or have been edited; not both.
    """

    def asked(judge: Judge) -> dict[str, Any]:
        return {
            name: [part["weight"], part.get("function", ":").partition(":")[2], part.get("settings")]
            for name, part in judge.items()
        }

    changed = [name for name in after if name in before and before[name].get("code") != after[name].get("code")]
    is_other = any(before[name].get("function") != after[name].get("function") for name in changed)
    if is_other or asked(before) != asked(after):
        raise ConfigError(
            f"--against: {which} had another judge: {_said(before)} before, {_said(after)} now; scores of two judges do not say which "
            "model is better. Give the reward.* keys of the earlier result, or leave --against out"
        )
    return [f"the code of {after[name]['function']}, which judged {which}" for name in changed]


def _said(judge: Judge) -> str:
    parts = []
    for name, part in judge.items():
        settings = ", ".join(f"{key}={value}" for key, value in (part.get("settings") or {}).items())
        weight = f"{part['weight']:g} x " if len(judge) > 1 or part["weight"] != 1 else ""
        parts.append(f"{weight}{part.get('function', name)}" + (f"({settings})" if settings else ""))
    return " + ".join(parts)


def _template_differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    if before.get("hash") == after.get("hash"):
        return []
    names = [name for name in after if name not in ("files", "hash") and before.get(name) != _as_json(after[name])]
    said = [f"{name} {before.get(name)!r} before, {after[name]!r} now" for name in names if name != "extraction"]
    return said or ["the task's examples or the code that asks and reads"]


def _as_json(value: Any) -> Any:
    """What a result file has of a value."""
    return json.loads(json.dumps(value, default=str))
