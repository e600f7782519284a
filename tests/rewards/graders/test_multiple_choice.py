# ruff: noqa: RUF001  (the characters are meant)
from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.errors import DataError
from lockstep.rewards.graders.multiple_choice import compute_score, last_choice

HELLASWAG = Path(__file__).parents[4] / "shared/data/hellaswag"
ENDINGS = ["he runs away.", "he runs", "she sits down.", "a dog barks."]


@pytest.mark.parametrize(
    ("response", "choice"),
    [
        # says that it is the answer
        ("Answer: B", "B"),
        ("The answer is (C).", "C"),
        ("the answer is **C**", "C"),
        ("**Answer:** C", "C"),
        ("Answer:\nC", "C"),
        (r"\boxed{B}", "B"),
        (r"$\boxed{\text{(B)}}$", "B"),
        ("#### B", "B"),
        ("<answer>B</answer>", "B"),
        ("The best ending is (a)", "A"),
        ("The correct option is D", "D"),
        ("I choose C.", "C"),
        ("Final answer: C) he sits", "C"),
        ("Answer: A, because it fits", "A"),
        ("Answer: A is right", "A"),
        ("answer: b.", "B"),
        ("Answer: a", "A"),
        ("Answer: 1", "B"),
        ("Ａｎｓｗｅｒ： Ｂ", "B"),
        ("Answer: A\nOn second thought.\nAnswer: B", "B"),
        ("The answer is B, not A", "B"),
        ("The answer is B. Option A is wrong.", "B"),
        (r"Answer: B \boxed{B}", "B"),
        ("A. foo\nB. bar\n\nAnswer: B", "B"),
        # stands alone
        ("B", "B"),
        ("B.", "B"),
        ("(B)", "B"),
        ("Let me think.\nB\n", "B"),
        ("1", "B"),
        ("B. he runs", "B"),
        ("I think option A is wrong.\nSo it is option B", "B"),
        # two answers, or none
        ("Answer: A or B", None),
        ("Answer: A, B", None),
        ("Answer: B/C", None),
        (r"Answer: A \boxed{B}", None),
        ("Answer: A\nAnswer: B", None),
        ("(A) and (B)", None),
        ("A\nB\nC\nD", None),
        ("A. foo\nB. bar\nC. baz\nD. qux", None),
        ("A man walks", None),
        ("Answer: A man walks", None),
        ("Answer: a man walks", None),
        ("The answer is not A", None),
        ("Answer: 2.5", None),
        ("Answer: 10", None),
        ("Answer: 3 people", None),
        ("Answer: E", None),
        ("", None),
    ],
)
def test_the_last_answer_is_read(response, choice):
    assert last_choice(response) == choice
    for truth in "ABCD":
        assert compute_score(response, truth) == float(truth == choice)


@pytest.mark.parametrize(
    ("response", "choice"),
    [
        ("he runs away.", "A"),
        ("So  he\nruns", "B"),
        ("I say: she sits down. Surely.", "C"),
        ("he runs away. Or she sits down.", None),
        ("Answer: D, not he runs away.", "D"),
        ("he walks", None),
    ],
)
def test_a_quoted_ending_is_an_answer_where_no_letter_is(response, choice):
    assert last_choice(response, ENDINGS) == choice
    assert compute_score(response, "A", {"endings": np.array(ENDINGS, dtype=object)}) == float(choice == "A")
    assert compute_score(response, "A", {"choices": ENDINGS}) == float(choice == "A")


@settings(max_examples=50, deadline=None)
@given(st.sampled_from("ABCD"), st.sampled_from("ABCD"))
def test_letters_and_labels_are_the_same_ground_truth(answer, truth):
    label = "ABCD".index(truth)
    for ground_truth in (truth, truth.lower(), label, str(label), np.int64(label)):
        assert compute_score(f"Answer: {answer}", ground_truth) == float(answer == truth)
        assert compute_score(f"Answer: {'ABCD'.index(answer)}", ground_truth) == float(answer == truth)


@pytest.mark.skipif(not HELLASWAG.is_dir(), reason="the shared data folder is not here")
def test_every_ending_of_hellaswag_is_recognised_by_its_letter_and_by_its_text():
    rows = [json.loads(line) for name in ("train", "val") for line in (HELLASWAG / f"{name}.jsonl").read_text().splitlines()]
    assert len(rows) == 1000
    by_text = 0
    for row in rows:
        info, right = {"endings": row["endings"]}, row["label"]
        assert compute_score(f"Answer: {'ABCD'[right]}. {row['endings'][right]}", right, info) == 1.0
        assert compute_score(f"Answer: {'ABCD'[right - 1]}. {row['endings'][right - 1]}", right, info) == 0.0
        by_text += compute_score(row["endings"][right], right, info)
        assert compute_score(row["endings"][right - 1], right, info) == 0.0
    assert by_text >= 990  # an ending may mention "(A)" or repeat another


@pytest.mark.parametrize("truth", [None, "", "E", 4, -1, "10", True, "AB", 1.5])
def test_another_ground_truth_is_an_error(truth):
    with pytest.raises(DataError, match="A to D or 0 to 3"):
        compute_score("Answer: A", truth)


@pytest.mark.parametrize("endings", ["abcd", {"text": ["a"]}, [1, 2], ["a"] * 5])
def test_endings_that_are_no_list_of_texts_are_an_error(endings):
    with pytest.raises(DataError, match="endings"):
        compute_score("Answer: A", "A", {"endings": endings})
