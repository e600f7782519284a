import asyncio
import inspect

import pytest

from lockstep.agents import Action, Fault, Tool, ToolCall, ToolEnvironment, ToolError
from lockstep.errors import ConfigError


def divide(a: float, b: float = 1.0) -> float:
    """Divides.

    Args:
        a: What is divided.
        b: By what.
    """
    if b == 0:
        raise ToolError("b is 0")
    return a / b


async def look_up(word: str) -> dict:
    """Looks a word up.

    Args:
        word: The word.
    """
    await asyncio.sleep(0)
    return {"word": word, "found": True}


def act(*calls, faults=()):
    return Action("", "", tuple(ToolCall(name, arguments) for name, arguments in calls), faults)


def answers(turn):
    turn = asyncio.run(turn) if inspect.isawaitable(turn) else turn
    return [message["content"] for message in turn.messages]


def test_a_call_is_made_when_the_one_before_has_answered():
    said = []

    async def write(word: str) -> str:
        """Writes.

        Args:
            word: What.
        """
        await asyncio.sleep(0)
        said.append(word)
        return "written"

    def read() -> str:
        """Reads."""
        return " ".join(said)

    calls = act(("read", {}), ("write", {"word": "a"}), ("read", {}), ("write", {"word": "b"}), ("read", {}))
    assert answers(ToolEnvironment([write, read]).step(calls)) == ["", "written", "a", "written", "a b"]


@pytest.mark.parametrize("more", [[], [look_up]], ids=["sync", "async"])
def test_calls_are_answered_in_order_and_the_policys_faults_are_text(more):
    environment = ToolEnvironment([divide, *more])
    turn = environment.step(
        act(
            ("divide", {"a": 1, "b": 4}),
            ("divide", {"a": 1, "b": 0}),
            ("divide", {}),
            ("divide", {"a": "x"}),
            ("divide", {"a": True}),
            ("divide", {"a": 1, "c": 1}),
            ("fly", {}),
            *([("look_up", {"word": "é"})] if more else []),
            faults=(Fault("a tool call must be so"),),
        )
    )
    expected = [
        "0.25",
        "error: b is 0",
        "error: divide needs the argument 'a'",
        "error: the argument 'a' of divide must be number, not \"x\"",
        "error: the argument 'a' of divide must be number, not true",
        "error: divide has no argument 'c'; it has a, b",
        f"error: there is no tool 'fly'; there are: divide{', look_up' if more else ''}",
        *(['{"word": "é", "found": true}'] if more else []),
        "error: a tool call must be so",
    ]
    turn = asyncio.run(turn) if inspect.isawaitable(turn) else turn
    assert answers(turn) == expected
    assert turn.faults == 6  # the last was told by the parser, which counts it


def test_what_a_program_prints_is_text():
    def output() -> bytes:
        """Prints."""
        return "é\n".encode() + b"\xff"

    assert answers(ToolEnvironment([output]).step(act(("output", {})))) == ["é\n�"]


def test_no_call_ends_the_episode_and_another_exception_is_the_tools_own():
    def breaks() -> None:
        """Breaks."""
        raise OSError("no disk")

    environment = ToolEnvironment([breaks])
    assert environment.step(act()).done
    with pytest.raises(OSError, match="no disk"):
        environment.step(act(("breaks", {})))


@pytest.mark.parametrize(
    "schema", [{"type": "object", "properties": {}}, {"type": "function", "function": {"name": "other", "parameters": {}}}, "x"]
)
def test_a_schema_that_is_not_the_tools_is_refused_by_name(schema):
    with pytest.raises(ConfigError, match="the schema of the tool weather must be"):
        Tool("weather", schema, print)


def test_a_function_without_hints_or_docstring_is_refused_by_name():
    def bare(a):
        return a

    with pytest.raises(ConfigError, match="bare"):
        Tool.of(bare)
