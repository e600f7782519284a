from __future__ import annotations

import json
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lockstep.errors import DataError, ResourceError
from lockstep.judging.code import compute_score, extract_program
from lockstep.judging.sandbox import LocalSandbox, ProgramLimits, Result, Sandbox
from lockstep.rewards.graders import default_compute_score

DATA = Path(__file__).parents[3] / "shared/data/code"
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason="the shared data folder is not here")


@pytest.fixture(scope="module")
def sandbox():
    if shutil.which("bwrap") is None:
        pytest.skip("bubblewrap is not installed")
    with LocalSandbox(limits=ProgramLimits(wall_s=5.0, memory_mb=512)) as made:
        yield made


@pytest.fixture(scope="module")
def judge(sandbox):
    """`judge(response, ground_truth)`."""
    return lambda response, ground_truth, **options: compute_score(response, ground_truth, sandbox=sandbox, **options)


def rows(name):
    return [json.loads(line) for line in (DATA / f"{name}.jsonl").read_text().splitlines()]


def scores(sandbox, judge, pairs):
    with ThreadPoolExecutor(sandbox.max_concurrent) as threads:
        return [result["score"] for result in threads.map(lambda pair: judge(*pair), pairs)]


# -- real data -------------------------------------------------------------------------------------------------------------


@needs_data
@pytest.mark.slow
def test_every_humaneval_reference_passes_as_completion_or_function_and_broken_ones_fail(sandbox, judge):
    tasks = rows("humaneval")
    assert len(tasks) == 164
    completions = [(task["canonical_solution"], task) for task in tasks[::2]]
    functions = [(f"So:\n```python\n{task['prompt']}{task['canonical_solution']}```", json.dumps(task)) for task in tasks[1::2]]
    assert scores(sandbox, judge, completions + functions) == [1.0] * 164
    broken = [(f"```python\n{task['prompt']}    return None\n```", task) for task in tasks[::4]]
    assert scores(sandbox, judge, broken) == [0.0] * 41


@needs_data
def test_every_eighth_mbpp_reference_passes_and_broken_ones_fail(sandbox, judge):
    tasks = rows("mbpp")[::8]
    assert len(tasks) == 122
    assert scores(sandbox, judge, [(task["code"], task) for task in tasks]) == [1.0] * 122
    broken = [
        (f"{task['code']}\nfor name in {_functions(task)}: globals()[name] = lambda *a, **k: NotImplemented", task)
        for task in tasks[::4]
    ]
    assert scores(sandbox, judge, broken) == [0.0] * 31


def _functions(task):
    return [line.split("def ")[1].split("(")[0].strip() for line in task["code"].splitlines() if line.startswith("def ")]


@needs_data
def test_mbpp_tests_may_use_classes_of_the_program_and_a_function_named_like_a_builtin(judge):
    tasks = {task["task_id"]: task for task in rows("mbpp")}
    for number in (367, 601, 126, 533):  # trees, pairs, sum(a, b), types as arguments
        assert judge(tasks[number]["code"], tasks[number])["score"] == 1.0, number


SOLUTIONS = {
    "Mr. Chanek has an integer represented by a string s.": """
        import itertools
        s = input()
        found = set()
        for x in '0123456789' if 'X' in s else '0':
            t = s.replace('X', x)
            tail = ['0123456789' if c == '_' else c for c in t[-2:]]
            for end in itertools.product(*tail):
                end = ''.join(end)
                full = t[:-2] + end
                if int(end) % 25 == 0 and (len(full) == 1 or full[0] != '0'):
                    free = t[:-2].count('_')
                    ways = 10 ** free
                    if len(full) > 2 and full[0] == '_':
                        ways = ways // 10 * 9
                    found.add((x, end, ways))
        print(sum(ways for _, _, ways in found))
    """,
    "CQXYM is counting permutations length of 2n.": """
        import sys
        _, *numbers = map(int, sys.stdin.read().split())
        table = [1, 1]
        for i in range(3, 2 * max(numbers) + 1):
            table.append(table[-1] * i % (10**9 + 7))
        for n in numbers:
            print(table[2 * n - 1])
    """,
    "Mr. Chanek lives in a city represented as a plane.": """
        import math
        n, k = map(int, input().split())
        points = [tuple(map(int, input().split())) for _ in range(n)]
        def most(r):
            ends, always = [], 0
            for x, y in points:
                d = math.hypot(x, y)
                if d == 0: always += 1
                elif d <= 2 * r:
                    a, h = math.atan2(y, x), math.acos(d / (2 * r))
                    for turn in (0, 2 * math.pi): ends += [(a - h + turn, 0), (a + h + turn, 1)]
            best = now = 0
            for _, kind in sorted(ends):
                now += 1 - 2 * kind
                best = max(best, now)
            return best + always
        low, high = 0.0, 2e5
        for _ in range(100):
            middle = (low + high) / 2
            low, high = (low, middle) if most(middle) >= k else (middle, high)
        print(high)
    """,
}


@needs_data
@pytest.mark.parametrize("opening", SOLUTIONS)
def test_solutions_of_contest_problems_pass_all_cases_and_wrong_ones_do_not(judge, opening):
    (task,) = [row for row in rows("code_contests_stdio") if row["problem"].strip().startswith(opening)]
    program = __import__("textwrap").dedent(SOLUTIONS[opening])
    result = judge(f"```python\n{program}\n```", json.dumps(task["tests"]))
    assert (result["score"], result["passed"]) == (1.0, len(task["tests"]["inputs"])), result
    result = judge(program.replace("print(", "print(1 + "), task["tests"])
    assert (result["score"], result["status"]) == (0.0, "failed")
    assert result["reason"].startswith("wrong answer")


# -- which text is the program ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("response", "program"),
    [
        ("x = 1", "x = 1"),
        ("```\na\n```", "a\n"),
        ("```python\na\n```\ntext\n```py\nb\n```\nend", "b\n"),
        ("```python\na\n```\nIt prints:\n```text\n5\n```", "a\n"),
        ("```text\na\n```\n```\nb\n```", "b\n"),
        ("text\n```Python3 title=x\na\n", "a\n"),
        ("  ```python\n  a\n  ```", "  a\n"),
        ("```python\r\na = '```'\nb\n```", "a = '```'\nb\n"),
        ("```python\n```", ""),
    ],
)
def test_the_last_python_block_is_the_program(response, program):
    assert extract_program(response) == program


def test_a_megabyte_of_fences_is_read_in_time():
    began = time.process_time()
    extract_program("```python\n" * 100_000)
    extract_program("`" * 1_000_000)
    assert time.process_time() - began < 2


PROMPT = 'from typing import List\n\n\ndef twice(x: List[int]) -> List[int]:\n    """ Double each. """\n'
TWICE = {"prompt": PROMPT, "entry_point": "twice", "test": "def check(candidate):\n    assert candidate([1, 2]) == [2, 4]\n"}


@pytest.mark.parametrize(
    "response",
    [
        "    return [2 * y for y in x]",
        "return [2 * y for y in x]",
        "y = []\nfor z in x:\n    y.append(2 * z)\nreturn y",
        "```python\n    return [2 * y for y in x]\n```",
        "def twice(x: List[int]):\n    return [2 * y for y in x]",
        "import math\ndef helper(y): return 2 * y\ntwice = lambda x: list(map(helper, x))",
        "class Solution:\n    pass\ndef twice(x): return [y + y for y in x]\nprint('noise' * 1000)",
    ],
)
def test_a_humaneval_response_may_be_a_completion_or_a_whole_function(judge, response):
    assert judge(response, TWICE) == {"score": 1.0, "passed": 1, "total": 1, "status": "passed", "reason": ""}


def test_the_prompt_of_humaneval_may_lie_in_extra_info(judge):
    truth = {"test": TWICE["test"]}
    assert judge("return [2 * y for y in x]", truth, extra_info={"prompt": PROMPT, "entry_point": "twice"})["score"] == 1.0
    with pytest.raises(DataError, match="entry_point"):
        judge("return x", truth, extra_info={"prompt": [{"role": "user"}]})


def test_what_the_prompt_defines_is_not_taken_from_the_program(judge):
    truth = {
        "prompt": "def right(x):\n    return x == 2\n\ndef two():\n    ''' 2 '''\n",
        "entry_point": "two",
        "test": "def check(candidate):\n    assert right(candidate())",
    }
    assert judge("def two(): return 2", truth)["score"] == 1.0
    assert judge("def right(x): return True\ndef two(): return 3", truth)["score"] == 0.0


# -- the forms and the score -----------------------------------------------------------------------------------------------


def test_the_score_is_all_or_nothing_or_the_fraction(judge):
    truth = {"test_list": ["assert f(1) == 1", "assert f(2) == 4", "assert f(3) == 9", "assert f(4) == 16"]}
    program = "def f(x): return x * x if x != 2 else 0"
    assert judge(program, truth) == {"score": 0.0, "passed": 1, "total": 4, "status": "failed", "reason": "AssertionError"}
    assert judge(program, truth, continuous=True) == {
        "score": 0.75,
        "passed": 3,
        "total": 4,
        "status": "failed",
        "reason": "AssertionError",
    }
    assert judge("def f(x): return x * x", truth, continuous=True)["score"] == 1.0


def test_functions_with_arguments_as_in_apps(judge):
    truth = {"fn_name": "add", "inputs": [[1, 2], [[1], [2]]], "outputs": [[3], [[1, 2]]]}
    assert judge("def add(a, b): return a + b", truth)["score"] == 1.0
    assert judge("class Solution:\n    def add(self, a, b): return a + b", truth)["score"] == 1.0
    assert judge("def add(a, b): return 3", truth) == {
        "score": 0.0, "passed": 1, "total": 2, "status": "failed", "reason": "wrong answer: 3 instead of [[1, 2]]",
    }  # fmt: skip
    assert judge("def other(): pass", truth)["reason"] == "the program does not define add"


def test_lists_of_lines_are_stdin_and_stdout_too(judge):
    assert (
        judge("print(int(input()) + int(input()))\nprint('x')", {"inputs": [["1", "2"]], "outputs": [["3", "x"]]})["score"] == 1.0
    )


def test_a_script_may_read_in_any_way_and_must_exit_with_zero(judge):
    truth = {"inputs": ["3\n4\n", "5\n6\n"], "outputs": ["7", "11"]}
    for program in (
        "print(int(input()) + int(input()))",
        "import sys\nprint(sum(map(int, sys.stdin)))",
        "print(sum(map(int, open(0).read().split())))\nexit()",
        "import sys\nsys.stdout.write(str(sum(map(int, sys.stdin.buffer.read().split()))))",
        "import threading\ndef f(): print(int(input()) + int(input()))\nif __name__ == '__main__': threading.Thread(target=f).start()",
        "import atexit\natexit.register(lambda: print(int(input()) + int(input())))",
    ):
        assert judge(program, truth)["score"] == 1.0, program
    failed = judge("print(int(input()) + int(input()))\nraise SystemExit(3)", truth)
    assert (failed["score"], failed["reason"]) == (0.0, "exit code 3: ")
    assert judge("print(7)\n1 / 0", truth)["reason"] == "exit code 1: ZeroDivisionError: division by zero"
    assert (
        judge("import os, time\nprint(int(input()) + int(input()), flush=True)\nif os.fork() == 0: time.sleep(60)", truth)["score"]
        == 1.0
    )


@pytest.mark.parametrize(
    ("program", "status", "reason"),
    [
        ("def f(:", "failed", "SyntaxError: the program raised SyntaxError"),
        ("", "failed", "NameError: name 'f' is not defined"),
        ("raise ValueError('no')", "failed", "ValueError: the program raised ValueError: no"),
        ("def f(x): raise KeyError(x)", "failed", "KeyError"),
        ("def f(x): return f(x)", "failed", "RecursionError"),
        ("def f(x):\n    while True: pass", "timeout", "timeout"),
        ("while True: pass", "timeout", "timeout"),
        ("def f(x): return bytearray(10**10)", "failed", "MemoryError"),
        ("def f(x): return 'x' * 10**8", "failed", "the program's answer cannot be read"),
        ("def f(x):\n    y = []\n    for _ in range(10**5): y = [y]\n    return y", "failed", "RecursionError"),
        ("def f(x): import os; os.abort()", "failed", "the program ended before it answered"),
        (
            "import os, time\nfor i in range(30):\n    if os.fork() == 0: x = b'1' * (10**8); time.sleep(60)\ntime.sleep(60)",
            "memory",
            "memory",
        ),
    ],
)
def test_a_program_at_fault_scores_nothing_and_says_why(sandbox, program, status, reason):
    quick = LocalSandbox(limits=ProgramLimits(wall_s=0.5 if status == "timeout" else 30.0, memory_mb=512))
    result = compute_score(program, {"test_list": ["assert f(1) == 1"] * 3}, sandbox=quick)
    assert (result["score"], result["passed"], result["status"]) == (0.0, 0, status), result
    assert reason in result["reason"]


def test_a_case_that_runs_out_of_time_ends_the_run(sandbox):
    quick = LocalSandbox(limits=ProgramLimits(wall_s=0.5, memory_mb=512))
    truth = {"inputs": ["1"] + ["0"] * 20, "outputs": ["1"] * 21}
    began = time.monotonic()
    result = compute_score("if not int(input()):\n    while True: pass\nprint(1)", truth, sandbox=quick, continuous=True)
    assert (result["passed"], result["status"]) == (1, "timeout")
    assert time.monotonic() - began < 5


# -- cheats ----------------------------------------------------------------------------------------------------------------

CHEATS = {
    "says so": "print('passed')\nprint('All tests passed')\ndef f(x): return None",
    "exits early": "import sys\nsys.exit(0)",
    "exits hard": "import os\nos._exit(0)",
    "exits when called": "def f(x):\n    import os; os._exit(0)",
    "raises SystemExit when called": "def f(x): raise SystemExit(0)",
    "exits at the end": "import atexit, os\natexit.register(os._exit, 0)\ndef f(x): return None",
    "equal to everything": "class E:\n    def __eq__(self, other): return True\n    __hash__ = None\ndef f(x): return E()",
    "a number equal to everything": "class E(int):\n    __eq__ = lambda a, b: True\n    __hash__ = int.__hash__\ndef f(x): return E()",
    "never unequal": "class E(int):\n    __ne__ = lambda a, b: False\n    __eq__ = lambda a, b: True\n    __bool__ = lambda a: True\nf = E",
    "own check": "def check(candidate): pass\ndef f(x): return None",
    "own assertion error": "import builtins\nclass A(Exception): pass\nAssertionError = builtins.AssertionError = A\ndef f(x): return None",
    "own exec": "import builtins\nbuiltins.exec = builtins.compile = lambda *a, **k: None\ndef f(x): return None",
    "own builtins": "def set(x): return {2}\ndef sorted(x): return [2]\ndef len(x): return 2\ndef f(x): return None",
    "patches modules": "import sys\nfor name in list(sys.modules): sys.modules[name] = None\ndef f(x): return None",
    "patches the judge's functions": (
        "import sys\nframe = sys._getframe()\nwhile frame:\n"
        "    for name in ('same_value', 'same_output', '_judge', '_judge_code', '_close'): frame.f_globals[name] = lambda *a: ''\n"
        "    frame = frame.f_back\ndef f(x): return None"
    ),
    "looks for the test in its memory": (
        "import ctypes, re\ndef f(x):\n    for line in open('/proc/self/maps'):\n"
        "        a, b = (int(n, 16) for n in line.split()[0].split('-'))\n        if ' rw' in line and '[' not in line or 'heap' in line:\n"
        "            found = re.search(rb'\\(%d\\)\\)? [!=]= .(\\d)' % x, ctypes.string_at(a, b - a))\n"
        "            if found: return [int(found[1])]"
    ),
    "reads the judge's memory": (
        "import re\ndef f(x):\n    for line in open('/proc/1/maps'):\n        a, b = (int(n, 16) for n in line.split()[0].split('-'))\n"
        "        with open('/proc/1/mem', 'rb') as memory:\n            memory.seek(a)\n"
        "            found = re.search(rb'== .(\\d)', memory.read(b - a))\n"
        "            if found: return [int(found[1])]"
    ),
    "writes to the judge's files": (
        "import glob, os\nfor path in glob.glob('/proc/*/fd/*') + [f'/proc/1/fd/{i}' for i in range(20)]:\n"
        "    try: open(path, 'wb').write(b'0000000as7;started0000000dt2;s0;l1;s0;' * 3)\n    except OSError: pass\ndef f(x): return None"
    ),
    "writes to all its own files": (
        "import os\nfor i in range(64):\n    try: os.write(i, b'00000012t3;s5;valuel1;i2;s0;' * 5 + b'0000000dt2;s0;l1;s0;')\n"
        "    except OSError: pass\ndef f(x): return None"
    ),
    "kills the judge": "import os\nfor pid in (1, os.getppid(), -1): \n    try: os.kill(pid, 9)\n    except OSError: 0\ndef f(x): return 0",
    "stops the judge": "import os\nos.kill(1, 19)\ndef f(x): return None",
    "traces the judge": "import ctypes\nctypes.CDLL(None).ptrace(16, 1, 0, 0)\ndef f(x): return None",
    "starves the judge": (
        "import resource\nfor n in range(16):\n    try: resource.prlimit(1, n, (1, 1))\n    except Exception: pass\ndef f(x): return 0"
    ),
    "threads left running": (
        "import os, threading\ndef talk():\n    while True:\n        for i in range(3, 9):\n"
        "            try: os.write(i, b'0000000fs7;passedd')\n            except OSError: pass\n"
        "threading.Thread(target=talk, daemon=True).start()\ndef f(x): return None"
    ),
    "a child that stays": "import os, time\nif os.fork() == 0: time.sleep(60)\ndef f(x): return None",
    "answers with the other case's answer": "def f(x): return [[2], [3]][x - 2]",
}


CHECK = "def check(candidate):\n    assert set(candidate(1)) == {2}\n    assert not candidate(2) != [3]\n"
NEXT = [
    {"test_list": ["assert set(f(1)) == {2}", "assert sorted(f(2)) == [3]"]},
    {"prompt": "def f(x):\n    ''' [x + 1] '''\n", "test": CHECK, "entry_point": "f"},
    {"fn_name": "f", "inputs": [[1], [2]], "outputs": [[[2]], [[3]]]},
]


@pytest.mark.parametrize("name", ["", *CHEATS])
def test_cheating_does_not_pass(judge, name):
    program = CHEATS.get(name, "def f(x): return [x + 1]")
    assert [judge(program, truth)["score"] for truth in NEXT] == [0.0 if name else 1.0] * 3


FIND_OLD_ANSWERS = """
import ctypes, gc, re, sys
def f(x):
    frame = sys._getframe()
    seen = [repr(gc.get_objects())]
    while frame:
        seen.append(repr(frame.f_locals)[:10**6])
        frame = frame.f_back
    for line in open('/proc/self/maps'):
        a, b = (int(n, 16) for n in line.split()[0].split('-'))
        if ' rw' in line and '[' not in line or 'heap' in line or 'stack' in line:
            seen.append(ctypes.string_at(a, b - a).decode('latin-1'))
    found = re.search('hidden' + '-[0-9]+-end', ''.join(seen))
    return found and found[0]
"""

NO_PASS = {
    "a module of its own": ("class math:\n    isclose = lambda *a: True\ndef f(x): return 0", ["assert math.isclose(f(1), 2.0)"]),
    "a module with functions of its own": (
        "import math\nmath.isclose = lambda *a: True\ndef f(x): return 0",
        ["assert math.isclose(f(1), 2)"],
    ),
    "a function of a module": ("def isclose(*a): return True\ndef f(x): return 0", ["assert isclose(f(1), 2.0)"]),
    "a builtin": ("def abs(x): return 0\ndef f(x): return 0", ["assert abs(f(1) - 2.0) < 1e-6"]),
    "nothing at all": ("", ["assert gcd(4, 6) == 2"]),
    "nothing that is a builtin": ("", ["assert max(4, 6) == 6"]),
    "StopIteration in a loop": ("def f(x): raise StopIteration", ["for y in map(f, [1, 2]): assert y == 5"]),
    "StopIteration in a comprehension": ("def f(x): raise StopIteration", ["assert list(filter(f, [1, 2])) == []"]),
    "an end that the test catches": ("import os\ndef f(x): os._exit(0)", ["try: f(1)\nexcept: pass"]),
    "an end, and then a loop": (
        "import os\ndef f(x): os._exit(0)",
        ["while True:\n    try:\n        f(1)\n    except:\n        break"],
    ),
    "infinity near": ("def f(x): return 1.0", {"fn_name": "f", "inputs": [[1]], "outputs": [float("inf")]}),
    "infinity in a list": ("def f(x): return [1e308]", {"fn_name": "f", "inputs": [[1]], "outputs": [[[float("inf")]]]}),
    "its own helper of a prompt that does not parse": (
        "def right(x): return True\ndef two(): return 3",
        {
            "prompt": "def right(x):\n    return x == 2\n\ndef two():\n",
            "entry_point": "two",
            "test": "def check(candidate):\n    assert right(candidate())",
        },
    ),
    "its own builtin in a check": (
        "def set(x): return {2}\ndef f(x): return None",
        {"prompt": "", "entry_point": "f", "test": "def check(candidate):\n    assert set(candidate(1)) == {2}"},
    ),
    "what earlier cases expected": (
        FIND_OLD_ANSWERS,
        {"fn_name": "f", "inputs": [[1], [2], [3]], "outputs": [["hidden-1234-end"]] * 3},
    ),
    "a judge that is killed": (
        "import os, signal\nfor name in os.listdir('/proc'):\n    if name.isdigit() and int(name) not in (1, os.getpid()):\n"
        "        os.kill(int(name), signal.SIGKILL)\ndef f(x): return 2",
        ["assert f(1) == 2"],
    ),
}
"""Program, and tests that it must not pass."""


@pytest.mark.parametrize("name", NO_PASS)
def test_no_program_passes_without_solving(judge, name):
    program, truth = NO_PASS[name]
    truth = truth if isinstance(truth, dict) else {"test_list": truth}
    for continuous in (False, True):
        assert judge(program, truth, continuous=continuous)["passed"] == 0


@pytest.mark.parametrize(
    ("program", "truth"),
    [
        ("import math\ndef f(x): return x + 1", {"test_list": ["assert math.isclose(f(1), 2.0)"]}),
        ("def f(x): return x + 1", {"test_list": ["assert isclose(f(1), 2.0)", "assert Counter([f(1)]) == Counter([2])"]}),
        ("def f(x): return x + 1", {"test_list": ["assert m.isclose(f(1), 2.0)"], "test_imports": ["import math as m"]}),
        ("def gcd(a, b): return a if not b else gcd(b, a % b)", {"test_list": ["assert gcd(4, 6) == 2"]}),
        ("def statistics(x): return x", {"test_list": ["assert statistics(3) == 3"]}),  # called: no module
        ("import sys\ndef size(x): return sys.getsizeof(x)", {"test_list": ["assert size(()) == sys.getsizeof(())"]}),
        ("def f(x): return float('inf')", {"fn_name": "f", "inputs": [[1]], "outputs": [float("inf")]}),
        ("    return 2", {"prompt": "def right(x):\n    return x == 2\n\ndef two():\n", "entry_point": "two",
                         "test": "def check(candidate):\n    assert right(candidate())"}),
        ("def f(x): raise ValueError(x)", {"test_list": ["try:\n    f(1)\nexcept ValueError:\n    pass\nelse:\n    assert 0"]}),
    ],
)  # fmt: skip
def test_names_of_the_tests_own_world_are_there(judge, program, truth):
    assert judge(program, truth)["score"] == 1.0, judge(program, truth)


COLLIDING = """
import os
def f(x):
    items = b''.join(b'i%x;' % (i * (2**61 - 1)) for i in range(1, 60000))
    raw = b't3;s5;valuee%x;' % 59999 + items + b's0;'
    for descriptor in range(3, 10):
        try: os.write(descriptor, b'%08x' % len(raw) + raw)
        except OSError: pass
    while True: pass
"""


# Gives the judge a function and reads no request any more: the next one fills the pipe.
FULL_PIPE = """
import os, time
for descriptor in range(3, 10):
    try: os.write(descriptor, b'00000014t3;s5;valuet1;h0;s0;')
    except OSError: pass
time.sleep(60)
"""


@pytest.mark.parametrize(
    "program",
    [
        COLLIDING,
        FULL_PIPE,
        "import os, signal\nfor name in os.listdir('/proc'):\n    if name.isdigit() and int(name) not in (1, os.getpid()):\n"
        "        os.kill(int(name), signal.SIGSTOP)\ndef f(x): return x",
        "import signal, time\nfor n in set(signal.Signals) - {9, 19}: signal.signal(n, signal.SIG_IGN)\ntime.sleep(60)",
        "def f(x):\n    while True:\n        try: yield 1\n        except BaseException: pass",
        "def f(x): return 10 ** 10 ** 7",
    ],
)
def test_no_program_holds_the_judge_past_its_time(sandbox, program):
    quick = LocalSandbox(limits=ProgramLimits(wall_s=1.0, memory_mb=512))
    began = time.monotonic()
    result = compute_score(program, {"test_list": ["assert sorted(f('x' * 10**6)) == ['x']"] * 20}, sandbox=quick)
    assert (result["score"], result["passed"]) == (0.0, 0)
    assert time.monotonic() - began < 1.0 + 2.0 + 1.0  # its time, two seconds, and one to start on a busy machine


STDIO_CHEATS = {
    "exits": "import os\nos._exit(0)",
    "reads the judge's input": "print(open('/proc/1/fd/0').read())",
    "reads the judge's memory": "print(open('/proc/1/mem', 'rb').read(100))",
    "prints a verdict": "import os\nfor i in range(64):\n    try: os.write(i, b'0000000dt2;s0;l1;s0;')\n    except OSError: pass",
    "patches the comparison": "import sys\nsys._getframe().f_back.f_globals.update(same_output=lambda *a: 1, _same_word=lambda *a: 1)",
    "leaves the answer in a file": "import os\nprint(open('a').read() if os.path.exists('a') else '')\nopen('a', 'w').write('4')",
    "prints too much": "while True: print(4)",
}


@pytest.mark.parametrize("name", ["", *STDIO_CHEATS])
def test_cheating_scripts_do_not_pass(judge, name):
    program = STDIO_CHEATS.get(name, "print(int(input()) ** 2)")
    assert judge(program, {"inputs": ["2", "3"], "outputs": ["4", "9"]})["score"] == (0.0 if name else 1.0)


# -- what is not the program's fault ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ground_truth", "message"),
    [
        ("no json", "must be a dict or JSON"),
        ("[1]", "must be a dict"),
        ({"answer": 3}, r"test_list \(MBPP\)"),
        ({"test": "def check(c): pass"}, "entry_point"),
        ({"test": "def check(", "entry_point": "f"}, "not Python"),
        ({"test_list": ["assert ("]}, "not Python"),
        ({"test_list": []}, "empty test_list"),
        ({"inputs": [], "outputs": []}, "at least one"),
        ({"inputs": ["1"], "outputs": ["1", "2"]}, "1 inputs and 2 outputs"),
        ({"inputs": [1], "outputs": ["1"]}, "must be strings"),
        ({"fn_name": "f", "inputs": ["1"], "outputs": ["1"]}, "list of arguments"),
    ],
)
def test_a_ground_truth_that_cannot_be_used_is_a_data_error(ground_truth, message):
    with pytest.raises(DataError, match=message):
        compute_score("x", ground_truth)


class Answers(Sandbox):
    """A sandbox that gives back what it is told to."""

    def __init__(self, result):
        super().__init__(1, ProgramLimits())
        self.result = result

    def _execute(self, program, stdin, wall_s):
        if isinstance(self.result, Exception):
            raise self.result
        return self.result

    def _end_all(self):
        pass


def test_a_sandbox_that_fails_is_an_exception_and_never_a_score():
    truth = {"test_list": ["assert f(1) == 1"]}
    with pytest.raises(ResourceError, match="gone"):
        compute_score("x", truth, sandbox=Answers(ResourceError("gone")))
    never = Result(status="error", exit_code=1, stdout="", stderr="ImportError: _ctypes", seconds=0.1)
    with pytest.raises(ResourceError, match="the judge did not start.*_ctypes"):
        compute_score("x", truth, sandbox=Answers(never))


def test_a_verdict_without_the_secret_counts_for_nothing():
    forged = Result(status="ok", exit_code=0, stdout="0000000as7;started0000000ct2;s0;l1;s0;", stderr="", seconds=0.1)
    assert compute_score("x", {"test_list": ["assert f(1) == 1"]}, sandbox=Answers(forged))["score"] == 0.0


def test_the_rule_is_reached_by_data_source(sandbox):
    assert default_compute_score("mbpp", "def f(): return 1", {"test_list": ["assert f() == 1"]})["score"] == 1.0
