r"""The responses to try: right answers, nonsense, and programs that try to leave the sandbox; and the score that each may get.

A reward function says what the right answer of a row is by a function `gold_response(ground_truth, extra_info) -> str | None` in its own
module; None: this row has no right answer to try. Without such a function it is

```text
gsm8k            extra_info["answer"] when it has "####", else "#### 42"
math             extra_info["solution"] when it has a box, else "\boxed{42}"
multiple choice  "Answer: B"
code             the reference program in extra_info, fenced; none without one
any other        the ground truth itself
```

Each attacking program probes for one thing that lies outside. Only when it finds it, it prints the right answer: then the score says that
it was outside. A written file and a connection are seen from here as well, whatever the score is.
"""

import base64
import functools
import hashlib
import json
import os
import secrets
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Self

from lockstep.errors import RewardError
from lockstep.processes import KillableWorker

_REPEATS = 2_000
_NESTED = 10_000
_LONG = 1_000_000
_FULL_WIDTH = {ord(digit): ord(digit) - ord("0") + 0xFF10 for digit in "0123456789"}
_ARABIC = "\u0627\u0644\u062c\u0648\u0627\u0628"  # the answer
_RULES = ("lockstep.rewards.graders.", "lockstep.judging.")
_PROGRAM_KEYS = ("solution", "canonical_solution", "reference_solution", "code", "solutions")
GoldResponse = Callable[[Any, Mapping[str, Any]], str | None]


class AllowedScore(StrEnum):
    """The score that a response may get."""

    MOST = "the most"
    """The response is right."""
    ANYTHING = "anything"
    """The response is right in an odd spelling: a matter of taste."""
    LESS_THAN_GOLD = "less than gold"
    NOTHING = "nothing"
    NO_ESCAPE = "nothing, unless it left the sandbox"


@dataclass(frozen=True)
class Response:
    """One response to try."""

    name: str
    text: str
    allowed: AllowedScore


def cheap_responses(prompt: str) -> Iterator[Response]:
    """Yield what a policy finds first when a reward has a hole."""
    yield Response("empty", "", AllowedScore.NOTHING)
    yield Response("echo of the prompt", prompt, AllowedScore.NOTHING)
    yield Response("one word repeated", "the " * _REPEATS, AllowedScore.NOTHING)


def odd_responses(gold: str | None, other_gold: str | None) -> Iterator[Response]:
    """Yield long, deep and strange responses. `gold` is the row's right answer, `other_gold` the answer of another row, if it differs."""
    nested = r"\frac{1}{" * _NESTED + "1" + "}" * _NESTED
    yield Response("nested LaTeX, 100 kB", rf"The answer is $\boxed{{{nested}}}$", AllowedScore.NOTHING)
    # Digits, commas, brackets and blanks, which patterns for answers stumble over.
    piece = "((1,234.5 + x) = {y}), [-7]    so the answer is not here; "
    yield Response("1 MB of text", piece * (_LONG // len(piece)), AllowedScore.NOTHING)
    if gold is not None and other_gold is not None:
        yield Response("two answers, the last one wrong", f"{gold}\n\n{other_gold}", AllowedScore.LESS_THAN_GOLD)
    right = gold if gold is not None else "42"
    yield Response("answer with a unit", f"{right} apples", AllowedScore.ANYTHING)
    yield Response("lone surrogates", f"\ud83d {right} \udc00", AllowedScore.ANYTHING)
    yield Response("right-to-left text", f"\u202e{_ARABIC} {right}\u202c", AllowedScore.ANYTHING)
    yield Response("full-width digits", right.translate(_FULL_WIDTH), AllowedScore.ANYTHING)
    yield Response("emoji", f"\U0001f469\u200d\U0001f467 {right} \u2705", AllowedScore.ANYTHING)


# -- right answers -----------------------------------------------------------------------------------------------------------------------


def gold_response(
    functions: Sequence[Callable[..., Any]], ground_truth: Any, extra_info: Any, worker: KillableWorker, timeout_s: float
) -> str | None:
    """Return the right answer for the first of the row's reward functions that is known or offers `gold_response`.

    A user's `gold_response` is called in `worker`. Raises RewardError if it fails, or returns neither a text nor None.
    """
    extra = extra_info if isinstance(extra_info, Mapping) else {}
    for function in functions:
        module = _module_of(function)
        offered = getattr(sys.modules.get(module), "gold_response", None)
        if offered is not None:
            answer = worker.call(offered, timeout_s, ground_truth=ground_truth, extra_info=extra_info)
            if not isinstance(answer, str | None):
                raise RewardError(f"gold_response of {module} must return a text or None, not {answer!r:.100}")
            return answer
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
    """Return the text under `key` of extra_info if it has the mark of an answer, else the ground truth in this form."""

    def build(ground_truth: Any, extra: Mapping[str, Any]) -> str | None:
        text = extra.get(key)
        return text if isinstance(text, str) and mark in text else form.format(ground_truth)

    return build


def _multiple_choice(ground_truth: Any, extra: Mapping[str, Any]) -> str | None:
    label = str(ground_truth).strip()
    if label in ("0", "1", "2", "3"):
        label = "ABCD"[int(label)]
    return f"Answer: {label}"


def _code(ground_truth: Any, extra: Mapping[str, Any]) -> str | None:
    program = next((extra[key] for key in _PROGRAM_KEYS if extra.get(key)), None)
    if isinstance(program, str) and program.lstrip().startswith("["):  # APPS keeps its solutions as a JSON list
        with suppress(ValueError):
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

# -- programs that try to leave the sandbox ----------------------------------------------------------------------------------------------

_VARIABLE = "LOCKSTEP_REWARD_CHECK_TRAP"

_PROGRAM = """\
import os
def _found():
{probe}
try:
    _was_found = _found()
except Exception:
    _was_found = False
if not _was_found:
    raise SystemExit(1)
import base64
exec(compile(base64.b64decode("{prize}").decode(), "program.py", "exec"), globals())
"""

_PROBES = {
    "reads /etc/passwd": """\
    import hashlib
    return hashlib.sha256(open("/etc/passwd", "rb").read()).hexdigest() == "{passwd}"
""",
    "reads the environment": """\
    import hashlib
    if "{secret}" in os.environ.values():
        return True
    for name in os.listdir("/proc"):
        try:
            environment = open("/proc/" + name + "/environ", "rb").read()
        except OSError:
            continue
        if hashlib.sha256(environment).hexdigest() == "{environment}":
            return True
    return False
""",
    "opens a socket": """\
    import socket
    socket.create_connection(("127.0.0.1", {port}), 2).close()
    return True
""",
    "writes outside": """\
    open({file!r}, "w").close()
    return True
""",
    # Children that hold the pipes keep a careless judge waiting for the end of the output.
    "leaves children behind": """\
    import time
    for _ in range(20):
        if os.fork() == 0:
            time.sleep(30)
            os._exit(0)
    os._exit(0)
""",
    "exits with success": """\
    os._exit(0)
""",
}
"""What a program tries -> the body of a function that returns whether it worked."""


class Traps:
    """Inside `with`: a secret in the environment, a listening socket and a folder, for programs to reach."""

    def __enter__(self) -> Self:
        self._secret = secrets.token_hex(16)
        os.environ[_VARIABLE] = self._secret
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._socket.setblocking(False)
        self._folder = Path(tempfile.mkdtemp(prefix="lockstep-trap-"))
        self._folder.chmod(0o777)  # a program may run as another user
        return self

    def __exit__(self, *_: object) -> None:
        del os.environ[_VARIABLE]
        self._socket.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def responses(self, prize: str | None, runs_programs: bool) -> Iterator[Response]:
        """Yield one response for each thing to try. `prize` is the program that runs if it worked; without it, the score cannot tell."""
        known = {
            "passwd": _hash_of("/etc/passwd"),
            "environment": _hash_of("/proc/self/environ"),
            "secret": self._secret,
            "port": self._socket.getsockname()[1],
            "file": str(self._folder / "written"),
        }
        allowed = AllowedScore.NO_ESCAPE if runs_programs else AllowedScore.NOTHING
        encoded = base64.b64encode((prize or "").encode("utf-8", "replace")).decode()
        for name, probe in _PROBES.items():
            program = _PROGRAM.format(probe=probe.format(**known).rstrip(), prize=encoded)
            yield Response(f"program that {name}", f"```python\n{program}```", allowed)

    def sprung(self) -> list[str]:
        """Return what a program has done outside."""
        found = []
        if (self._folder / "written").exists():
            found.append("a program in a response wrote a file outside the sandbox")
        with suppress(BlockingIOError):
            self._socket.accept()[0].close()
            found.append("a program in a response opened a connection to this machine")
        return found


def _hash_of(path: str) -> str:
    """Return the hash that a program can know only if it reads the file; "" if the file cannot be read here."""
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError:
        return ""
