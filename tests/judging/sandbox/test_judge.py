"""The parts of the judge that need no sandbox; what it does in one is in tests/judging/test_code.py."""

from __future__ import annotations

import pytest

from lockstep.judging.sandbox.base import judge_program
from lockstep.judging.sandbox.judge import same_output, same_value


def test_its_text_is_one_file_without_imports_of_ours():
    text = judge_program()
    compile(text, "judge.py", "exec")
    assert "import lockstep" not in text
    assert "from lockstep" not in text


@pytest.mark.parametrize(
    ("got", "expected", "is_same"),
    [
        ("1 2 3\n", " 1  2\r\n3", True),
        ("1 2", "1 2 3", False),
        ("", "", True),
        ("abc", "abC", False),
        ("0.3333333", "0.333333", True),
        ("0.3334", "0.3333", False),
        ("1000000.5", "1000000.0", True),
        ("1e-7", "0.0", True),
        ("3.0", "3", False),
        ("3", "3.0", True),
        ("1000000008", "1000000007", False),
        ("nan", "1.5", False),
        ("inf", "1.5", False),
        ("1_5.0", "15.0", False),
        ("1.5.0", "1.5", False),
        ("-0.0", "0.0", True),
    ],
)
def test_outputs_are_compared_word_by_word_and_fractions_within_a_millionth(got, expected, is_same):
    assert same_output(got, expected) is is_same


@pytest.mark.parametrize(
    ("got", "expected", "is_same"),
    [
        (3, 3, True),
        (3, [3], True),
        ((1, 2), [1, 2], True),
        ([[1, (2,)]], [[1, [2]]], True),
        (True, 1, False),
        ("3", 3, False),
        (0.1 + 0.2, 0.3, True),
        (3.0, 3, True),
        ({"a": (1.0,)}, {"a": [1.0000001]}, True),
        ({"a": 1}, {"b": 1}, False),
        (None, [], False),
        (None, [None], True),
    ],
)
def test_values_are_compared_as_json_would_see_them(got, expected, is_same):
    assert same_value(got, expected) is is_same
