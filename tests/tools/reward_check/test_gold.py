"""The right answer of a row gets the most from the rule it is built for."""

import importlib
import json

import pytest
from helpers.rewards import truth

from lockstep.errors import RewardError
from lockstep.processes import CallTimeout, KillableWorker
from lockstep.tools.reward_check.gold import gold_response
from lockstep.utils.files import load_object

RULES = "lockstep.rewards.graders."
ROWS = [
    ("gsm8k", "1,234", {"answer": "1,000 + 234\n#### 1,234"}),
    ("gsm8k", 42, {"answer": "just 42"}),
    ("math", r"\frac{1}{2}", None),
    ("math", "3", {"solution": r"So $\boxed{3}$."}),
    ("multiple_choice", "2", None),
    ("multiple_choice", "B", {"endings": ["he runs", "he sits", "he eats", "he jumps"]}),
    ("exact_match", "cba", None),
    ("code", {"test_list": ["assert add(1, 2) == 3"]}, {"code": "def add(a, b):\n    return a + b"}),
    ("code", {"inputs": ["1\n"], "outputs": ["2\n"]}, {"solutions": json.dumps(["print(int(input()) + 1)"])}),
    (
        "code",
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
    compute_score = pytest.importorskip(RULES + rule).compute_score
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
