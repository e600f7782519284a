from __future__ import annotations

import json
import time
from decimal import Decimal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.errors import DataError
from lockstep.utils.reward_score.gsm8k import compute_score

GSM8K = Path(__file__).parents[4] / "shared/data/gsm8k"

numbers = st.decimals(min_value=-(10**9), max_value=10**9, places=2).map(abs) | st.integers(0, 10**12).map(Decimal)


@pytest.mark.skipif(not GSM8K.is_dir(), reason="the shared data folder is not here")
@pytest.mark.parametrize(("name", "num_rows"), [("train", 7473), ("test", 1319)])
def test_every_gold_answer_is_right_in_both_modes_and_its_neighbour_is_wrong(name, num_rows):
    rows = [json.loads(line) for line in (GSM8K / f"{name}.jsonl").read_text().splitlines()]
    assert len(rows) == num_rows
    for row in rows:
        truth = row["answer"].split("####")[1].strip()
        assert compute_score(row["answer"], truth) == 1.0
        assert compute_score(row["answer"], truth, method="flexible") == 1.0
        assert compute_score(row["answer"], str(Decimal(truth.replace(",", "")) + 1)) == 0.0


@given(number=numbers, is_negative=st.booleans(), data=st.data(), method=st.sampled_from(["strict", "flexible"]))
def test_equality_is_numeric_however_the_number_is_written(number, is_negative, data, method):
    written = f"{number:,f}" if data.draw(st.booleans(), "commas") else f"{number:f}"
    if "." in written:
        written += "0" * data.draw(st.integers(0, 3), "zeros")
    written = data.draw(st.sampled_from(["", "$"]), "dollar") + written
    written = ("-" if is_negative else "") + written
    written += data.draw(st.sampled_from(["", ".", " apples", "\n", ".\n", ","]), "behind")
    text = f"first 7, then 10-5=5 #### 8 \n####{data.draw(st.sampled_from(['', ' ', '  ']), 'blanks')}{written}"
    truth = -number if is_negative else number
    assert compute_score(text, f"{truth:f}", method=method) == 1.0
    assert compute_score(text, f"{truth + 1:f}", method=method, format_score=0.25) == 0.25


@pytest.mark.parametrize("response", ["42", "the answer is 42", "### 42", "####", "#### forty-two", "#### \n42", ""])
def test_strict_needs_the_four_hashes_and_a_number_behind_them(response):
    assert compute_score(response, "42", format_score=0.5) == 0.0


@pytest.mark.parametrize("response", ["#### 42/7", "#### 42.0.1", "#### 42,0", "#### 42,0000"])
def test_strict_does_not_take_the_first_part_of_something_else(response):
    assert compute_score(response, "42") == 0.0


@pytest.mark.parametrize(
    ("response", "truth"),
    [
        ("#### 1\n#### 2", 2),
        ("#### 2\n#### unknown", 2),
        ("#### $-2", -2),
        ("#### -$2", -2),
        ("#### - 2", -2),
        ("#### .5", 0.5),
    ],
)
def test_strict_takes_the_last_number_behind_hashes(response, truth):
    assert compute_score(response, truth) == 1.0


@pytest.mark.parametrize(
    ("response", "truth"),
    [
        ("10-5", "5"),
        ("3 - 5 = -2", "-2"),
        ("costs $1,234.50.", "1234.5"),
        ("(1,2)", "2"),
        ("f(x)-3", "3"),
        ("no", None),
    ],
)
def test_flexible_takes_the_last_number_and_a_minus_between_values_is_not_its_sign(response, truth):
    assert compute_score(response, truth or "0", method="flexible") == (1.0 if truth else 0.0)


@pytest.mark.parametrize(
    "unit",
    [
        "#",
        "#### ",
        " ",
        "#### -",
        "1",
        "1,",
        "1,111",
        "1.",
        "$",
        "-",
        "####1/",
        "####" + " " * 99,
        ".",
        "1" * 999 + "/",
    ],
)
def test_a_megabyte_of_anything_is_scored_quickly(unit):
    text = "####" + unit * (10**6 // len(unit))
    start = time.perf_counter()
    for method in ("strict", "flexible"):
        compute_score(text + "/3", "42", method=method)
    assert time.perf_counter() - start < 2


@pytest.mark.parametrize("truth", [None, "", "forty-two", "nan", float("inf")])
def test_a_ground_truth_that_is_no_number_is_an_error(truth):
    with pytest.raises(DataError, match="ground truth"):
        compute_score("#### 42", truth)


def test_an_unknown_method_is_an_error():
    with pytest.raises(ValueError, match="lenient"):
        compute_score("#### 42", "42", method="lenient")
