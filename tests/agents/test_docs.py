"""The code of docs/agents.md does what it says."""

import re
from dataclasses import fields
from pathlib import Path

import pytest

from lockstep.agents import Action, Tool, ToolCall, ToolEnvironment, Turn
from lockstep.agents.tools import tools_of

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


def test_the_tools_of_an_environment_of_the_page_see_its_state():
    (block,) = (block for block in BLOCKS if "class Shop" in block)
    exec(block, made := {"__name__": "shop"})
    game = made["Shop"]()
    assert {tool.name for tool in tools_of(made["Shop"])} == {"buy", "left"}
    game.reset({}, 1)
    calls = (ToolCall("buy", {"item": "tea", "count": 1}), ToolCall("buy", {"item": "tea", "count": 2}), ToolCall("left", {}))
    turn = game.step(Action("", "", calls))
    bought, refused, left = (message["content"] for message in turn.messages)
    assert (bought, left, turn.faults, turn.done) == ("bought; 6 coins are left", "6", 1, False)
    assert refused.startswith("error: 2 tea cannot be bought")
    end = game.step(Action("done", "done"))
    assert (end.done, end.reward, end.info) == (True, 0.4, {"money": 6})


@pytest.mark.parametrize("kind", [Action, Turn, ToolCall])
def test_every_field_of_a_turn_is_on_the_page(kind):
    text = (Path(__file__).parents[2] / "docs" / "agents.md").read_text()
    for field in fields(kind):
        assert f"`{field.name}`" in text
