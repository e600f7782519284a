import pytest

from lockstep.judging.sandbox import default_sandbox
from lockstep.tools.evaluate.grading import competition_math, gsm8k, program


@pytest.mark.parametrize(
    ("response", "strict", "flexible", "formatted"),
    [
        ("6 * 7 = 42\n#### 42", 1.0, 1.0, 1.0),
        ("6 * 7 = 42", 0.0, 1.0, 0.0),
        ("#### 41\nNo: it is 42", 0.0, 1.0, 1.0),
        ("#### 42\nThat took 3 steps", 1.0, 0.0, 1.0),
        ("I do not know", 0.0, 0.0, 0.0),
    ],
)
def test_gsm8k_is_read_strictly_and_flexibly(response, strict, flexible, formatted):
    found = gsm8k(response, "42")
    assert (found["score"], found["strict"], found["flexible"], found["formatted"]) == (strict, strict, flexible, formatted)


def test_the_answers_that_vote_are_numbers_however_they_are_written():
    assert gsm8k("#### $1,000.00", "1000")["strict_pred"] == gsm8k("#### 1000", "1000")["strict_pred"] == "1000"
    assert gsm8k("none", "1")["strict_pred"] is None


@pytest.mark.parametrize(
    ("response", "strict", "flexible"),
    [
        (r"so \boxed{\frac{1}{2}}", 1.0, 1.0),
        ("The answer is $0.5$.", 0.0, 1.0),
        ("Final answer: 1/2", 0.0, 1.0),
        ("we get $3$ and then $1/2$", 0.0, 1.0),
        ("It must be 0.5", 0.0, 1.0),
        (r"the answer is 1/2, no: \boxed{3}", 0.0, 0.0),
        ("who knows", 0.0, 0.0),
    ],
)
def test_mathematics_is_boxed_or_found(response, strict, flexible):
    found = competition_math(response, r"\frac{1}{2}")
    assert (found["strict"], found["flexible"], found["formatted"]) == (strict, flexible, float("boxed" in response))


def test_a_program_outside_a_fence_is_right_only_flexibly(monkeypatch):
    monkeypatch.setattr("lockstep.judging.code.compute_score", lambda *args, **kwargs: {"score": 1.0, "reason": ""})
    assert program("f = 1", {}, {"is_plain": False}) == {
        "score": 0.0, "strict": 0.0, "flexible": 1.0, "formatted": 0.0, "reason": "",
    }  # fmt: skip
    assert program("```python\nf = 1\n```", {}, {"is_plain": False})["strict"] == 1.0
    assert program("f = 1", {}, {"is_plain": True})["strict"] == 1.0


def test_a_plain_continuation_of_humaneval_runs_in_the_sandbox():
    truth = {
        "prompt": "def double(x):\n",
        "entry_point": "double",
        "test": "def check(candidate):\n    assert candidate(2) == 4\n",
    }
    sandbox = default_sandbox()
    right, wrong = (program(text, truth, {"is_plain": True}, sandbox)["score"] for text in ("    return 2 * x", "    return x"))
    assert (right, wrong) == (1.0, 0.0)
