"""Code: the program in the response must pass the tests in the ground truth. It runs in a sandbox (docs/sandbox.md).

Three forms of ground truth, each a dict or its JSON:

- HumanEval: {"test", "entry_point", "prompt"}. `test` defines check(candidate). The response is a whole function or the rest of `prompt`,
  which may be missing or lie in extra_info.
- MBPP: {"test_list", "test_setup_code", "test_imports"}. Each test is an assert; imports and set-up, which may be missing, run before each.
- Input and output (APPS, CodeContests, TACO, Codeforces): {"inputs", "outputs"}. Strings are stdin and stdout. With "fn_name", each entry
  of `inputs` is the list of arguments of that function and each of `outputs` what it must return.

The tests run in another process than the program, which sees the arguments of a call and nothing else: see `judging/sandbox/judge.py`.
"""

from __future__ import annotations

import ast
import builtins
import functools
import importlib
import json
import re
import secrets
import symtable
import sys
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lockstep.errors import DataError, ResourceError

if TYPE_CHECKING:
    from lockstep.judging.sandbox import Result, Sandbox

_FENCE = re.compile(r"^[ \t]*```[ \t]*(\w*)[^\n]*\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE)
_PYTHON = ("python", "python3", "py")
_MARGIN_S = 2.0
_BUILTINS = frozenset(dir(builtins))
_MODULES = ("math", "collections", "copy", "datetime", "decimal", "fractions")
"""Those whose functions and classes tests use without a module's name before them."""


def compute_score(
    solution_str: str,
    ground_truth: dict[str, Any] | str,
    extra_info: dict[str, Any] | None = None,
    sandbox: Sandbox | None = None,
    continuous: bool = False,
) -> dict[str, Any]:
    """Run the response's program against the test cases.

    The program is the last fenced block that is marked as Python, else the last fenced block, else the whole response.

    Args:
        solution_str: The response.
        ground_truth: The tests; see the module.
        extra_info: May hold the "prompt" and "entry_point" of HumanEval.
        sandbox: Where to run; None: `default_sandbox()`. Each case may take its `limits.wall_s`. A case that runs out of time ends the run.
        continuous: Score the fraction of cases that pass, instead of 1.0 when all do and 0.0 otherwise. Runs all cases, not only
            up to the first that fails.

    Returns {"score", "passed", "total", "status", "reason"}: the cases that passed, how many there are, "passed", "failed" or the limit
    that was broken (a `lockstep.judging.sandbox.Status`), and why the first case failed ("" when none did).

    Whatever a program does wrong scores 0.0. Raises DataError for tests that cannot be run and ResourceError when the sandbox fails.
    """
    # The process that scores by another rule imports this file too, and starts in half the time without the sandbox.
    from lockstep.judging.sandbox import default_sandbox
    from lockstep.judging.sandbox.wire import to_frame

    programs, cases = _read(ground_truth, extra_info or {}, extract_program(solution_str))
    sandbox = sandbox or default_sandbox()
    header = {
        "programs": programs,
        "is_script": "stdin" in cases[0],
        "num_cases": len(cases),
        "case_s": sandbox.limits.wall_s,
        "keep_going": continuous,
    }
    secret = secrets.token_hex(16)
    frames = b"".join(map(to_frame, (header, *cases, secret)))
    result = sandbox.judge(frames, sandbox.limits.wall_s * len(cases) + _MARGIN_S)
    outcomes = _outcomes(result, secret)
    if outcomes is None:  # the judge was ended with the program
        status = result.status
        reason = f"the program broke a limit: {result.status}"
        passed = 0
    else:
        passed = outcomes.count("")
        reason = next(filter(None, outcomes), "")
        status = "timeout" if reason == "timeout" else "failed" if passed < len(cases) else "passed"  # type: ignore[assignment]
    score = passed / len(cases) if continuous else float(passed == len(cases))
    return {"score": score, "passed": passed, "total": len(cases), "status": status, "reason": reason}


def extract_program(response: str) -> str:
    """The last fenced block that is marked as Python, else the last fenced block, else the whole text. A last fence that is never closed
    reaches to the end.
    """
    blocks = _FENCE.findall(response)
    marked = [text for language, text in blocks if language.lower() in _PYTHON]
    return marked[-1] if marked else blocks[-1][1] if blocks else response


# -- the forms of ground truth -------------------------------------------------------------------------------------------------


def _read(ground_truth: dict[str, Any] | str, extra: dict[str, Any], program: str) -> tuple[list[str], list[dict[str, Any]]]:
    """(source texts that the program may be, test cases)."""
    if isinstance(ground_truth, str):
        try:
            ground_truth = json.loads(ground_truth)
        except ValueError as error:
            raise DataError(f"the ground truth of a code row must be a dict or JSON, not {ground_truth!r:.100}") from error
    if not isinstance(ground_truth, dict):
        raise DataError(f"the ground truth of a code row must be a dict, not {ground_truth!r:.100}")
    if "test" in ground_truth:
        fields = {name: extra[name] for name in ("prompt", "entry_point") if isinstance(extra.get(name), str)} | ground_truth
        return _human_eval(program, **{name: fields.get(name) or "" for name in ("prompt", "test", "entry_point")})
    if "test_list" in ground_truth:
        imports = "\n".join(ground_truth.get("test_imports") or ())
        return [program], _mbpp(ground_truth["test_list"], ground_truth.get("test_setup_code") or "", imports)
    if "inputs" in ground_truth and "outputs" in ground_truth:
        return [program], _input_output(ground_truth["inputs"], ground_truth["outputs"], ground_truth.get("fn_name"))
    raise DataError(
        "the ground truth of a code row needs the keys test and entry_point (HumanEval), test_list (MBPP) or inputs and outputs, "
        f"not {sorted(ground_truth)}"
    )


def _human_eval(program: str, prompt: str, test: str, entry_point: str) -> tuple[list[str], list[dict[str, Any]]]:
    if not entry_point.isidentifier():
        raise DataError(f"a HumanEval row needs the name of its function in entry_point, not {entry_point!r}")
    if re.search(rf"^(?:async\s+)?def\s+{entry_point}\b|^{entry_point}\s*=", program, re.MULTILINE):
        programs = [f"{prompt}\n{program}", program]
    else:
        programs = [prompt + program, f"{prompt}    {program.lstrip()}", prompt + textwrap.indent(program, "    ")]
    # What the prompt defines is ours, so it comes from the prompt; only the function under test is the program's.
    given = _whole_part(prompt)
    own, names = _sources(test, dict.fromkeys(_names(given)[1] - {entry_point}, given))
    return programs, [{"setup": own, "names": names, "code": test, "entry_point": entry_point}]


def _mbpp(test_list: Sequence[str], setup: str, imports: str) -> list[dict[str, Any]]:
    if not len(test_list):
        raise DataError("a code row has an empty test_list")
    cases = []
    for test in test_list:
        code = f"{imports}\n{setup}\n{test}"
        own, names = _sources(code)
        cases.append({"setup": own, "names": names, "code": code, "entry_point": None})
    return cases


def _input_output(inputs: Sequence[Any], outputs: Sequence[Any], function: str | None) -> list[dict[str, Any]]:
    if len(inputs) != len(outputs) or not len(inputs):
        raise DataError(f"a code row has {len(inputs)} inputs and {len(outputs)} outputs; it needs as many of both, at least one")
    if function is None:
        return [{"stdin": _as_text(given), "stdout": _as_text(wanted)} for given, wanted in zip(inputs, outputs, strict=True)]
    if not all(isinstance(arguments, list | tuple) for arguments in inputs):
        raise DataError(f"with fn_name, each of the inputs must be a list of arguments, not {inputs[0]!r:.100}")
    return [{"function": function, "arguments": a, "expected": e} for a, e in zip(inputs, outputs, strict=True)]


def _as_text(lines: Any) -> str:
    """Some datasets keep stdin and stdout as lists of lines."""
    if isinstance(lines, list | tuple) and all(isinstance(line, str) for line in lines):
        return "\n".join(lines)
    if not isinstance(lines, str):
        raise DataError(f"without fn_name, inputs and outputs of a code row must be strings, not {lines!r:.100}")
    return lines


# -- which names a test takes from the program -----------------------------------------------------------------------------------


def _sources(test: str, given: dict[str, str] | None = None) -> tuple[str, list[str]]:
    """Where the names come from that `test` uses and does not define: (code that defines those of the test's own world, the names that
    the program defines). `given` says what code defines further names, of a test that gets the function under test by another way.

    The test's own world are builtins, modules of the standard library that it does not import, and what such modules have (`isclose`):
    were they the program's, it could fake what the test relies on. Where they are all that a test uses and nothing is `given`, they
    must be the program's: MBPP has functions named sum and gcd. Raises DataError when the test is not Python.
    """
    try:
        used, bound = _names(test)
    except (SyntaxError, ValueError) as error:
        raise DataError(f"the tests of a code row are not Python: {error}; they begin {test.strip()[:100]!r}") from error
    free = used - bound - {"__class__"}  # what super() refers to
    called = {node.func.id for node in ast.walk(ast.parse(test)) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    modules = {name: f"import {name}" for name in (free - called) & sys.stdlib_module_names} | (given or {})
    functions = {name: f"from {module} import {name}" for module in _MODULES for name in free & called & _public_names(module)}
    named = free - modules.keys()
    names = named - functions.keys() - _BUILTINS
    if given is None:
        names = names or named - _BUILTINS or named
    own = functions | modules
    return "\n".join(dict.fromkeys(own[name] for name in sorted((free & own.keys()) - names))), sorted(names)


@functools.cache
def _public_names(module: str) -> frozenset[str]:
    return frozenset(name for name in dir(importlib.import_module(module)) if not name.startswith("_"))


def _whole_part(prompt: str) -> str:
    """The longest beginning of a prompt, in lines, that is Python: one that ends in a bare signature does not parse as a whole."""
    lines = prompt.splitlines()
    return next(text for count in range(len(lines), -1, -1) if parses(text := "\n".join(lines[:count])))


def _names(code: str) -> tuple[set[str], set[str]]:
    """The names that the code uses, and those that it defines, in whatever scope."""
    tables = [symtable.symtable(code, "tests", "exec")]
    used = set()
    bound = set()
    for table in tables:
        tables += table.get_children()
        for symbol in table.get_symbols():
            used |= {symbol.get_name()} if symbol.is_referenced() else set()
            bound |= {symbol.get_name()} if symbol.is_assigned() or symbol.is_imported() or symbol.is_parameter() else set()
    return used, bound


def parses(code: str) -> bool:
    """Whether the text is Python."""
    try:
        ast.parse(code)
    except (SyntaxError, ValueError):
        return False
    return True


# -- the verdict -----------------------------------------------------------------------------------------------------------------


def _outcomes(result: Result, secret: str) -> list[str] | None:
    """The judge's verdict; None when it was ended before one. Raises ResourceError when the judge never started."""
    from lockstep.judging.sandbox.wire import to_frame

    started = to_frame("started").decode()
    if not result.stdout.startswith(started):
        raise ResourceError(f"the judge did not start in the sandbox ({result.status}): {result.stderr.strip()[-1000:]}")
    try:
        *outcomes, told = _frames(result.stdout[len(started) :])
    except (TypeError, ValueError):
        return None
    return outcomes if told == secret else None


def _frames(text: str) -> list[Any]:
    from lockstep.judging.sandbox.wire import decode

    values = []
    at = 0
    while at < len(text):
        size = int(text[at : at + 8], 16)
        values.append(decode(text[at + 8 : at + 8 + size].encode()))
        at += 8 + size
    return values
