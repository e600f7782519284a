"""The example of small sums: its questions and its reward."""

import runpy
from pathlib import Path

import pyarrow.parquet as pq
import pytest

SUMS = Path(__file__).parents[2] / "examples/sums"


@pytest.fixture
def rows(tmp_path):
    """The rows of both files, by name."""
    runpy.run_path(str(SUMS / "make_data.py"))["main"](tmp_path)
    return {name: pq.read_table(tmp_path / f"{name}.parquet").to_pylist() for name in ("train", "test")}


def test_the_files_share_no_question_and_every_truth_is_the_sum(rows):
    questions = {name: {row["prompt"][0]["content"] for row in part} for name, part in rows.items()}
    assert not questions["train"] & questions["test"]
    for row in rows["test"]:
        a, b = (int(word) for word in row["prompt"][0]["content"].removeprefix("What is ").split("?")[0].split(" + "))
        assert row["reward_model"]["ground_truth"] == str(a + b)


@pytest.mark.parametrize(
    ("response", "score"),
    [("65", 1.0), ("The sum is 65.", 1.0), ("19 + 46 = 65", 1.0), ("65 or 66", 0.0), ("165", 0.0), ("no number", 0.0), ("", 0.0)],
)
def test_the_last_number_is_judged(response, score):
    compute_score = runpy.run_path(str(SUMS / "reward.py"))["compute_score"]
    assert compute_score(response, "65") == score
