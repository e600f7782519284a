import pytest

from lockstep.agents import Action, ToolCall
from lockstep.agents.math_turns import MathTurns
from lockstep.errors import DataError

ROW = {"prompt": "6 times 7?", "data_source": "openai/gsm8k", "reward_model": {"ground_truth": "42"}}


def say(text):
    return Action(text, text)


def test_programs_run_and_answers_are_graded_attempt_by_attempt():
    pytest.importorskip("resource")
    environment = MathTurns()
    assert environment.reset(ROW, 0).messages == [{"role": "user", "content": "6 times 7?"}]
    turn = environment.step(Action("", "", (ToolCall("python", {"code": "print(6 * 7)"}),)))
    assert (turn.messages[0]["content"], turn.reward, turn.done) == ("42\n", None, False)
    turn = environment.step(say("#### 41"))
    assert (turn.reward, turn.done, turn.info) == (0.0, False, {"right": 0, "attempts": 1})
    assert "not right" in turn.messages[0]["content"]
    turn = environment.step(say("#### 42"))
    assert (turn.reward, turn.done, turn.info, turn.messages) == (0.5, True, {"right": 1, "attempts": 2}, [])


def test_the_first_answer_is_worth_most_and_the_last_wrong_one_ends_it():
    for answer, worth in (("#### 42", 1.0), ("I do not know", 0.0)):
        environment = MathTurns(attempts=1)
        environment.reset(ROW, 0)
        turn = environment.step(say(answer))
        assert (turn.reward, turn.done) == (worth, True)


def test_rows_without_a_truth_are_refused():
    with pytest.raises(DataError, match="ground_truth"):
        MathTurns().reset({"prompt": "?"}, 0)
