from __future__ import annotations

import re
from pathlib import Path

import pytest

from lockstep.errors import MissingExtra
from lockstep.judging import code, math
from lockstep.rewards import graders
from lockstep.rewards.graders import (
    _select_rm_score_fn,
    default_compute_score,
    exact_match,
    gsm8k,
    multiple_choice,
    register_score,
)

DOCS = Path(__file__).parents[3] / "docs/rewards.md"


@pytest.mark.parametrize(
    ("data_source", "module"),
    [
        ("openai/gsm8k", gsm8k),
        ("lighteval/MATH", math),
        ("DigitalLearningGmbH/MATH-lighteval", math),
        ("HuggingFaceH4/MATH-500", math),
        ("Rowan/hellaswag", multiple_choice),
        ("lockstep/reverse", exact_match),
        ("openai/openai_humaneval", code),
        ("google-research-datasets/mbpp", code),
        ("codecontests", code),
    ],
)
def test_each_data_source_has_its_rule(data_source, module):
    assert _select_rm_score_fn(data_source) is module.compute_score


def test_scores_are_those_of_the_rule():
    assert default_compute_score("openai/gsm8k", "#### 5", "5") == 1.0
    assert default_compute_score("lighteval/MATH", r"\boxed{\frac12}", "1/2", extra_info={"split": "test"}) == 1.0
    assert default_compute_score("lockstep/reverse", "ba", "ab") == 0.0


def test_an_unknown_data_source_names_itself_the_nearest_the_known_ones_and_the_way_out():
    with pytest.raises(
        NotImplementedError, match=r"'openai/gsm8'.*did you mean 'openai/gsm8k'.*lighteval/MATH.*reward.rules.*file.py:function"
    ):
        default_compute_score("openai/gsm8", "", "")
    with pytest.raises(NotImplementedError, match=r"'zzz'; known"):
        default_compute_score("zzz", "", "")


def test_a_rule_that_cannot_work_here_is_refused_when_it_is_selected(monkeypatch):
    monkeypatch.setattr(math, "_has_math_verify", lambda: False)
    with pytest.raises(MissingExtra, match=r"lockstep-rl\[math\]"):
        _select_rm_score_fn("lighteval/MATH")
    assert _select_rm_score_fn("openai/gsm8k") is gsm8k.compute_score


@pytest.fixture
def rules(monkeypatch):
    monkeypatch.setattr(graders, "_RULES", dict(graders._RULES))


def test_a_registered_rule_is_used(rules):
    @register_score("my/data")
    def length(solution_str, ground_truth):
        return {"score": float(len(solution_str)), "limit": ground_truth}

    assert default_compute_score("my/data", "abc", 7) == {"score": 3.0, "limit": 7}


def test_a_rule_is_given_the_arguments_it_names(rules):
    register_score("two")(lambda solution_str, ground_truth: {"score": 0.0})
    register_score("info")(lambda ground_truth, extra_info, solution_str: {"score": 0.0, "info": extra_info})
    register_score("all")(lambda **arguments: arguments)
    for source, expected in (
        ("two", {"score": 0.0}),
        ("info", {"score": 0.0, "info": {"a": 1}}),
        ("all", {"solution_str": "x", "ground_truth": "y", "data_source": "all", "extra_info": {"a": 1}, "sandbox": None}),
    ):
        assert default_compute_score(source, "x", "y", {"a": 1}, sandbox=None) == expected


def test_the_documented_rule_and_table_are_true(rules):
    text = DOCS.read_text()
    exec(re.findall(r"```python\n(.*?)```", text, re.DOTALL)[-1], {})
    assert default_compute_score("my/data", "ab", 4) == 0.5
    table = text.split("## Rules")[1].split("They are")[0]
    rows = re.findall(r"^\| (`[^|]+`) \| `(\w+)` \|", table, re.MULTILINE)
    documented = {source: name for sources, name in rows for source in re.findall("`(.*?)`", sources)}
    assert documented == {
        source: rule.split(".")[0] if isinstance(rule, str) else rule.__module__.rsplit(".", 1)[1]
        for source, rule in graders._RULES.items()
        if source != "my/data"
    }
