import pytest

from lockstep.errors import DataError
from lockstep.rewards.graders import default_compute_score

pytest.importorskip("math_verify")


@pytest.mark.parametrize(
    ("response", "pred"),
    [
        ("so\nAnswer: 42", "42"),
        ("Answer: 1\nno, Answer: $42$.", "42"),
        ("**Answer:** 42.", "42"),
        (r"answer : \boxed{42}", "42"),
        (r"without the word: \boxed{42}", "42"),
        ("Answer: x = 42", "x = 42"),
        ("Answer: 84/2", "84/2"),
        ("Answer: $42$<|im_end|>", "42"),
        ("Answer: the number is $42$, as we saw.", "42"),
        (r"Answer: \( 42 \)", "42"),
    ],
)
@pytest.mark.parametrize("source", ["math_dapo", "math_dapo_reasoning", "aime2024", "math"])
def test_the_last_answer_counts_in_any_equal_form(source, response, pred):
    assert default_compute_score(source, response, "42") == {"score": 1.0, "acc": True, "pred": pred}


@pytest.mark.parametrize(
    ("response", "pred"),
    [("Answer: 41", "41"), ("nothing", ""), (r"\boxed{42} Answer: 41", "41"), ("Answer: $42$ or $43$", "$42$ or $43$")],
)
def test_a_wrong_or_missing_answer_is_minus_one(response, pred):
    assert default_compute_score("math_dapo", response, "42") == {"score": -1.0, "acc": False, "pred": pred}


@pytest.mark.parametrize("response", ["Answer: 1", "nothing"])
def test_a_row_without_a_ground_truth_is_a_fault_of_the_data(response):
    with pytest.raises(DataError):
        default_compute_score("math_dapo", response, "")


def test_geometry_has_a_part_for_the_format():
    right = r"<think>a</think> \boxed{3}"
    assert default_compute_score("hiyouga/geometry3k", right, "3") == {"score": 1.0, "acc": True, "format": True}
    assert default_compute_score("hiyouga/geometry3k", r"\boxed{3}", "3")["score"] == pytest.approx(0.9)
    assert default_compute_score("hiyouga/geometry3k", right, "4")["score"] == pytest.approx(0.1)


@pytest.mark.parametrize("source", ["numina_olympiads", "deepscaler", "MATH-500", "HuggingFaceH4/MATH-500"])
def test_sources_of_boxed_answers(source):
    assert default_compute_score(source, r"\boxed{\frac12}", "0.5") == 1.0


def test_numina_takes_an_answer_without_a_box_where_there_is_no_box():
    for response in ("The answer is 42.", "Answer: $42$", "so the answers are: 42", r"the answer is 41, no, \boxed{42}"):
        assert default_compute_score("numina_olympiads", response, "42") == 1.0, response
    for response in ("42", "it is 42", r"\boxed{41}. The answer is 42.", "The answer is 41 or 42"):
        assert default_compute_score("numina_olympiads", response, "42") == 0.0, response
