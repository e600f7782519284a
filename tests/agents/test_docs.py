"""The code of docs/agents.md does what it says."""

import re
from pathlib import Path

import pytest

from lockstep.agents import Action, Tool, ToolCall, ToolEnvironment

BLOCKS = re.findall(r"```python\n(.*?)```", (Path(__file__).parents[2] / "docs" / "agents.md").read_text(), re.DOTALL)


def test_the_tool_and_the_environment_of_the_page_work():
    tool, environment = {}, {}
    exec(BLOCKS[0], tool)
    assert Tool.of(tool["population"]).schema["function"]["parameters"]["required"] == ["city"]
    assert [tool["population"](city) for city in ("Oslo", "Rome")] == ["717,710", "not known"]
    exec(BLOCKS[1], schema := {})
    turn = ToolEnvironment([schema["weather"]]).step(
        Action("", "", (ToolCall("weather", {"day": "today"}), ToolCall("weather", {"day": "now"})))
    )
    assert [message["content"][:20] for message in turn.messages] == ["rain", "error: the argument "]
    exec(BLOCKS[2], environment)
    game = environment["Guess"]()
    assert "Guess" in game.reset({}, 1).messages[0]["content"]
    low, high = 1, 100
    for _ in range(8):
        guess = str((low + high) // 2)
        turn = game.step(Action(text=guess, content=guess))
        if turn.done:
            break
        low, high = (int(guess) + 1, high) if turn.messages[0]["content"] == "higher" else (low, int(guess) - 1)
    assert turn.reward == pytest.approx(1 / game.tries)
    assert game.step(Action(text="what?", content="what?")).messages[0]["content"] == "a number, please"
