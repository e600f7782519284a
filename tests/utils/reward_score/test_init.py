from __future__ import annotations

import pytest

from lockstep.utils import reward_score
from lockstep.utils.reward_score import (
    _select_rm_score_fn,
    code,
    default_compute_score,
    exact_match,
    gsm8k,
    math,
    register_score,
)


@pytest.mark.parametrize(
    ("data_source", "module"),
    [
        ("openai/gsm8k", gsm8k),
        ("lighteval/MATH", math),
        ("DigitalLearningGmbH/MATH-lighteval", math),
        ("HuggingFaceH4/MATH-500", math),
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


def test_an_unknown_data_source_names_itself_the_known_ones_and_the_way_out():
    with pytest.raises(NotImplementedError, match=r"'my/data'.*openai/gsm8k.*reward.custom_reward_function.path"):
        default_compute_score("my/data", "", "")


def test_a_registered_rule_is_used(monkeypatch):
    monkeypatch.setattr(reward_score, "_RULES", dict(reward_score._RULES))

    @register_score("my/data")
    def length(solution_str, ground_truth):
        return {"score": float(len(solution_str)), "limit": ground_truth}

    assert default_compute_score("my/data", "abc", 7) == {"score": 3.0, "limit": 7}
