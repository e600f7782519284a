import pytest

from lockstep.errors import DataError
from lockstep.rewards.graders import default_compute_score

TARGET = {"target": ["The Beatles", "Beatles"]}


@pytest.mark.parametrize(
    ("response", "score"),
    [
        ("<answer>the beatles!</answer>", 1.0),
        ("<answer>Queen</answer> no: <answer> Beatles </answer>", 1.0),
        ("<answer>Beatles</answer> no: <answer>Queen</answer>", 0.0),
        ("The Beatles", 0.0),
        ("<answer>Beatles", 0.0),
        ("<answer>x</answer>" * 10 + "<answer>Beatles</answer>", 0.25),
    ],
)
def test_the_last_answer_is_compared_in_normal_form(response, score):
    found = default_compute_score("searchR1_nq", response, TARGET)
    assert (found["score"], found["acc"]) == (score, score > 0)


def test_answers_may_stand_without_the_dict():
    assert default_compute_score("searchR1_popqa", "<answer>x</answer>", "X")["acc"]
    with pytest.raises(DataError, match="target"):
        default_compute_score("searchR1_popqa", "<answer>x</answer>", {"target": None})
