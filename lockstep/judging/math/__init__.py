r"""MATH: the content of the last \boxed{...}, compared with the ground truth as mathematics.

```text
response -> last_boxed -> spell (spelling) -> parse, equal (structure, values) -> 1.0 or 0.0
                                                       '- where algebra must decide: same (symbolic), in a process with a deadline
```

Most rows are decided by spelling and exact fractions; the rest goes to one process for each of ours, which is killed at the deadline.
docs/rewards.md lists what counts as equal.
"""

import contextlib
import functools
import importlib.util
import re
from collections import deque

from lockstep.errors import DataError, MissingExtra
from lockstep.judging.math.spelling import closing_braces, spell
from lockstep.judging.math.structure import equal, parse
from lockstep.judging.math.values import Comparator, Undecided
from lockstep.processes import KillableWorker

_BOX = re.compile(r"\\(?:boxed|fbox)(?![a-zA-Z])")
_MAX_BOX = 10_000
_MAX_ANSWER = 2_000
_worker = KillableWorker()


def compute_score(solution_str: str, ground_truth: str | int | float, timeout_s: float = 5.0) -> float:
    r"""1.0 when the last \boxed{...} (or \fbox{...}, or `\boxed 5`) equals the ground truth, else 0.0.

    The ground truth is the answer itself, without a box. An answer of more than 2,000 characters is right only when it is the ground truth
    character by character. Raises DataError when the ground truth is empty or missing, MissingExtra without math-verify, and RewardError
    (CallTimeout, CallFailed, CallCrashed) when the algebra of one row does not end within `timeout_s` or breaks down.
    """
    check()
    if isinstance(ground_truth, bool) or not isinstance(ground_truth, str | int | float) or not str(ground_truth).strip():
        raise DataError(f"a MATH row needs its answer in reward_model.ground_truth, not {ground_truth!r}")
    answer = last_boxed(solution_str)
    return float(answer is not None and is_same(answer, str(ground_truth), timeout_s))


def check() -> None:
    """Raises MissingExtra when math-verify is not installed: without it equal answers in another form would count as wrong."""
    if not _has_math_verify():
        raise MissingExtra("the rule for MATH", "math-verify", "math")


def is_same(answer: str, truth: str, timeout_s: float) -> bool:
    """Whether two answers, without their boxes, are the same mathematics. Raises RewardError as `compute_score` does."""
    if not answer.strip() or answer.strip() == truth.strip() or max(len(answer), len(truth)) > _MAX_ANSWER:
        return answer.strip() == truth.strip() != ""
    with contextlib.suppress(Undecided):
        return equal(parse(spell(answer)), parse(spell(truth)), Comparator())
    return _is_same_by_algebra(answer, truth, timeout_s)


@functools.lru_cache(maxsize=4096)
def _is_same_by_algebra(answer: str, truth: str, timeout_s: float) -> bool:
    # Cached, since the samples of a prompt often share an answer. Imported here, since most rows need no SymPy.
    from lockstep.judging.math import symbolic

    return bool(_worker.call(symbolic.same, timeout_s, answer=answer, truth=truth))


@functools.cache
def _has_math_verify() -> bool:
    return importlib.util.find_spec("math_verify") is not None


def last_boxed(text: str) -> str | None:
    r"""The content of the last box; None where there is none or its brace is not closed within 10,000 characters. `\boxed 5` ends at `$`
    or the line's end.
    """
    matches = deque(_BOX.finditer(text), maxlen=1)
    if not matches:
        return None
    rest = text[matches[0].end() : matches[0].end() + _MAX_BOX].lstrip()
    if not rest.startswith("{"):
        return re.split(r"[$\n]", rest, maxsplit=1)[0].strip() or None
    end = closing_braces(rest).get(0)
    return None if end is None else rest[1:end]
