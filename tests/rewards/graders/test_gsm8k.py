# ruff: noqa: RUF001  (the characters are meant)
from __future__ import annotations

import json
import re
from decimal import Decimal
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.errors import DataError
from lockstep.rewards.graders.gsm8k import compute_score

ROOT = Path(__file__).parents[3]
GSM8K = ROOT.parent / "shared/data/gsm8k"
DOCS = ROOT / "docs/rewards.md"

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


@settings(max_examples=50, deadline=None)
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


@pytest.mark.parametrize("method", ["strict", "flexible"])
def test_two_signs_are_none(method):
    assert compute_score("#### -$-5", "5", method=method) == 1.0
    assert compute_score("#### -$-5", "-5", method=method) == 0.0


def documented():
    rows = re.findall(r"^\| `(.*?)` \| (none|-?[0-9.]+) \|", DOCS.read_text(), re.MULTILINE)
    return [(response.replace("⏎", "\n"), None if number == "none" else number) for response, number in rows]


def test_the_documented_decisions_are_many():
    assert len(documented()) > 60


@pytest.mark.parametrize(("response", "number"), documented())
def test_strict_reads_what_the_documentation_says(response, number):
    if number is None:
        for wrong in [*re.findall("[0-9]+", response), "0"]:
            assert compute_score(f"5 and 9.\n{response}", wrong, format_score=0.5) == 0.0
    else:
        assert compute_score(f"5 and 9.\n{response}", number) == 1.0
        assert compute_score(f"5 and 9.\n{response}\nSo much for 77.", number) == 1.0
        assert compute_score(f"5 and 9.\n{response}", str(Decimal(number) + 1), format_score=0.5) == 0.5


@pytest.mark.parametrize(
    ("response", "truth"),
    [
        ("10-5", "5"),
        ("3 - 5 = -2", "-2"),
        ("costs $1,234.50.", "1234.5"),
        ("(1,2)", "2"),
        ("f(x)-3", "3"),
        ("it is 3/4", "0.75"),
        ("#### 5, or rather −７", "-7"),
        ("1/0", "1"),
        ("no", None),
    ],
)
def test_flexible_takes_the_last_number_and_a_minus_between_values_is_not_its_sign(response, truth):
    assert compute_score(response, truth or "0", method="flexible") == (1.0 if truth else 0.0)


@pytest.mark.parametrize("truth", [None, "", "forty-two", "nan", float("inf")])
def test_a_ground_truth_that_is_no_number_is_an_error(truth):
    with pytest.raises(DataError, match="ground truth"):
        compute_score("#### 42", truth)


def test_an_unknown_method_is_an_error():
    with pytest.raises(ValueError, match="lenient"):
        compute_score("#### 42", "42", method="lenient")
