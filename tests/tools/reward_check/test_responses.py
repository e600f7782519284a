"""The responses are as strange as they say, right answers get the most, and a program that gets outside is seen."""

import importlib
import json
import pickle
import subprocess
import sys

import pytest
from helpers.rewards import truth

from lockstep.errors import RewardError
from lockstep.judging.code import extract_program
from lockstep.judging.sandbox import LocalSandbox, ProgramLimits
from lockstep.processes import CallTimeout, KillableWorker
from lockstep.tools.reward_check.responses import AllowedScore, Traps, cheap_responses, gold_response, odd_responses
from lockstep.utils.files import load_object


def test_the_responses_are_as_long_deep_and_odd_as_their_names_say():
    odd = {response.name: response.text for response in odd_responses("#### 42", "#### 7")}
    assert 100_000 <= len(odd["nested LaTeX, 100 kB"].encode()) < 110_000
    assert odd["nested LaTeX, 100 kB"].count("{") == odd["nested LaTeX, 100 kB"].count("}") > 10_000
    assert 999_000 <= len(odd["1 MB of text"].encode()) <= 1_000_000
    assert odd["two answers, the last one wrong"] == "#### 42\n\n#### 7"
    assert odd["full-width digits"] == "#### \uff14\uff12"
    assert any(0xD800 <= ord(c) < 0xE000 for c in odd["lone surrogates"])
    assert len(set(odd.values())) == len(odd)


def test_only_a_right_answer_in_another_spelling_may_be_paid():
    for response in [*cheap_responses("What is 6 * 7?"), *odd_responses("#### 42", "#### 7")]:
        is_right = "42" in response.text or "\uff14\uff12" in response.text
        assert (response.allowed is AllowedScore.ANYTHING) == (is_right and "7" not in response.text)


def test_every_response_reaches_another_process_unchanged():
    for response in [*cheap_responses("prompt"), *odd_responses(None, None)]:
        assert pickle.loads(pickle.dumps(response)) == response


RULES = "lockstep.rewards.graders."
JUDGING = "lockstep.judging."
ROWS = [
    (RULES + "gsm8k", "1,234", {"answer": "1,000 + 234\n#### 1,234"}),
    (RULES + "gsm8k", 42, {"answer": "just 42"}),
    (JUDGING + "math", r"\frac{1}{2}", None),
    (JUDGING + "math", "3", {"solution": r"So $\boxed{3}$."}),
    (RULES + "multiple_choice", "2", None),
    (RULES + "multiple_choice", "B", {"endings": ["he runs", "he sits", "he eats", "he jumps"]}),
    (RULES + "exact_match", "cba", None),
    (JUDGING + "code", {"test_list": ["assert add(1, 2) == 3"]}, {"code": "def add(a, b):\n    return a + b"}),
    (JUDGING + "code", {"inputs": ["1\n"], "outputs": ["2\n"]}, {"solutions": json.dumps(["print(int(input()) + 1)"])}),
    (
        JUDGING + "code",
        {"test": "def check(f):\n    assert f(2) == 4", "entry_point": "double", "prompt": "def double(x):\n"},
        {"canonical_solution": "    return 2 * x\n"},
    ),
]


@pytest.fixture
def worker():
    worker = KillableWorker()
    yield worker
    worker.close()


@pytest.mark.parametrize(("rule", "ground_truth", "extra_info"), ROWS, ids=lambda value: value if isinstance(value, str) else "")
def test_the_rule_gives_its_own_gold_answer_the_most(rule, ground_truth, extra_info, worker):
    compute_score = importlib.import_module(rule).compute_score
    gold = gold_response([compute_score], ground_truth, extra_info, worker, timeout_s=5)
    score = compute_score(gold, ground_truth)
    assert (score["score"] if isinstance(score, dict) else score) == 1.0


def test_a_users_function_is_given_the_answer_of_known_data_or_the_ground_truth(worker):
    gsm8k = importlib.import_module(RULES + "gsm8k").compute_score
    assert gold_response([truth, gsm8k], "42", None, worker, timeout_s=5) == "#### 42"
    assert gold_response([truth], 42, None, worker, timeout_s=5) == "42"
    assert gold_response([truth], {"target": [1]}, None, worker, timeout_s=5) is None
    assert gold_response([importlib.import_module("lockstep.judging.code").compute_score], "{}", {}, worker, timeout_s=5) is None


def test_a_module_says_what_its_right_answer_is(tmp_path, worker):
    (tmp_path / "mine.py").write_text(
        "import time\n"
        "def compute_score(solution_str): return 1.0\n"
        "def gold_response(ground_truth, extra_info):\n"
        "    if ground_truth == 'hang': time.sleep(60)\n"
        "    return 7 if ground_truth == 'bad' else f'<answer>{ground_truth}{extra_info}</answer>'\n"
    )
    mine = load_object(str(tmp_path / "mine.py"), "compute_score")
    assert gold_response([mine], "42", "!", worker, timeout_s=5) == "<answer>42!</answer>"
    with pytest.raises(RewardError, match="must return a text or None, not 7"):
        gold_response([mine], "bad", None, worker, timeout_s=5)
    with pytest.raises(CallTimeout):
        gold_response([mine], "hang", None, worker, timeout_s=0.1)


FOUND = ["reads /etc/passwd", "reads the environment", "opens a socket", "writes outside"]
NEVER = ["leaves children behind", "exits with success"]


@pytest.fixture
def traps():
    with Traps() as traps:
        yield traps


def programs(traps):
    responses = traps.responses("print('the right answer')", runs_programs=True)
    return {response.name.removeprefix("program that "): extract_program(response.text) for response in responses}


def test_without_a_sandbox_each_probe_finds_what_it_looks_for(traps):
    assert sorted(programs(traps)) == sorted(FOUND + NEVER)
    for name in [*FOUND, "exits with success"]:
        done = subprocess.run([sys.executable, "-c", programs(traps)[name]], capture_output=True, text=True, timeout=60)
        assert (done.stdout == "the right answer\n") == (name in FOUND), (name, done.stderr)
    assert traps.sprung() == [
        "a program in a response wrote a file outside the sandbox",
        "a program in a response opened a connection to this machine",
    ]


def test_in_the_sandbox_no_probe_finds_anything(traps):
    sandbox = LocalSandbox(limits=ProgramLimits(wall_s=2.0))
    for name, program in programs(traps).items():
        assert "the right answer" not in sandbox.run(program).stdout, name
    assert traps.sprung() == []


def test_the_answer_cannot_be_read_off_the_program(traps):
    for response in traps.responses("print('#### 42')", runs_programs=False):
        assert "42'" not in response.text
        assert response.allowed is AllowedScore.NOTHING
