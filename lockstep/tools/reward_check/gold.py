r"""The right answer of a row, as a response that should earn the most.

A reward function says how by a function `gold_response(ground_truth, extra_info) -> str | None` in its own module. Without one:

```text
gsm8k            extra_info["answer"] when it has "####", else "#### 42"
math             extra_info["solution"] when it has a box, else "\boxed{42}"
multiple choice  "Answer: B"
code             the reference program in extra_info, fenced; none where there is none
any other        the ground truth itself
```

None is "this row has no right answer to try".
"""

import contextlib
import functools
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lockstep.errors import RewardError
from lockstep.processes import KillableWorker

_RULES = ("lockstep.rewards.graders.", "lockstep.judging.")
_PROGRAM_KEYS = ("solution", "canonical_solution", "reference_solution", "code", "solutions")
GoldResponse = Callable[[Any, Mapping[str, Any]], str | None]


def gold_response(
    functions: Sequence[Callable[..., Any]], ground_truth: Any, extra_info: Any, worker: KillableWorker, timeout_s: float
) -> str | None:
    """The right answer, built for the first of the row's reward functions that is known or offers `gold_response`.

    A user's `gold_response` is called in `worker`. Raises RewardError when it fails, or returns something else than a text or None.
    """
    extra = extra_info if isinstance(extra_info, Mapping) else {}
    for function in functions:
        module = _module_of(function)
        offered = getattr(sys.modules.get(module), "gold_response", None)
        if offered is not None:
            said = worker.call(offered, timeout_s, ground_truth=ground_truth, extra_info=extra_info)
            if not isinstance(said, str | None):
                raise RewardError(f"gold_response of {module} must return a text or None, not {said!r:.100}")
            return said
        name = module.rpartition(".")[2]
        if module.startswith(_RULES) and name in _BUILDERS:
            return _BUILDERS[name](ground_truth, extra)
    return _as_text(ground_truth, extra)


def _module_of(function: Callable[..., Any]) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__module__", None) or type(function).__module__


def _as_text(ground_truth: Any, extra: Mapping[str, Any]) -> str | None:
    return str(ground_truth) if isinstance(ground_truth, str | int | float) else None


def _worked_out(key: str, mark: str, form: str) -> GoldResponse:
    """The text under `key` of extra_info when it has the mark of an answer, else the ground truth in this form."""

    def build(ground_truth: Any, extra: Mapping[str, Any]) -> str | None:
        text = extra.get(key)
        return text if isinstance(text, str) and mark in text else form.format(ground_truth)

    return build


def _multiple_choice(ground_truth: Any, extra: Mapping[str, Any]) -> str | None:
    label = str(ground_truth).strip()
    return f"Answer: {'ABCD'[int(label)] if label in ('0', '1', '2', '3') else label}"


def _code(ground_truth: Any, extra: Mapping[str, Any]) -> str | None:
    program = next((extra[key] for key in _PROGRAM_KEYS if extra.get(key)), None)
    if isinstance(program, str) and program.lstrip().startswith("["):  # APPS keeps its solutions as a JSON list
        with contextlib.suppress(ValueError):
            program = json.loads(program)
    if isinstance(program, list):
        program = next((text for text in program if isinstance(text, str)), None)
    if not isinstance(program, str):
        return None
    return program if "```" in program else f"```python\n{program}\n```"


_BUILDERS: dict[str, GoldResponse] = {
    "gsm8k": _worked_out("answer", "####", "#### {}"),
    "math": _worked_out("solution", r"\boxed", r"\boxed{{{}}}"),
    "multiple_choice": _multiple_choice,
    "code": _code,
    "exact_match": _as_text,
}
"""Module of a rule -> its builder."""
