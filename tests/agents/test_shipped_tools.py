import pytest

from lockstep.agents import ToolError
from lockstep.agents.shipped_tools import calculator, python


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("(3 + 4) * 2 / 7", "2"),
        ("2 ** 10 - 1", "1023"),
        ("-sqrt(2)", "-1.41421356237"),
        ("max(1, 7 // 2) % 2", "1"),
        ("1 / 3", "0.333333333333"),
    ],
)
def test_expressions_are_computed(expression, value):
    assert calculator(expression) == value


@pytest.mark.parametrize(
    "expression",
    [
        "",
        "1 / 0",
        "__import__('os')",
        "9 ** 9 ** 9",
        "x",
        "(" * 5000,
        "'a' * 9",
        "True + 1",
        "10 ** 99 * 10 ** 99",
        "1e400",
        "(-8) ** 0.5",
    ],
)
def test_what_is_no_expression_is_text_for_the_policy(expression):
    with pytest.raises(ToolError, match="cannot be computed"):
        calculator(expression)


def test_programs_run_in_the_sandbox_and_their_errors_are_text():
    pytest.importorskip("resource")
    assert python("print(6 * 7)") == "42\n"
    assert "nothing" in python("x = 1")
    with pytest.raises(ToolError, match="ZeroDivisionError"):
        python("1 / 0")
