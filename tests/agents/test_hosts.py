"""Where environments live: what a process of its own needs to find them."""

from __future__ import annotations

import asyncio
import json
import threading
import time

import numpy as np
import pytest
from helpers.environments import Connects

from lockstep.agents import Action, Environment, Tool, ToolCall, ToolEnvironment, Turn, hosts, shipped_tools
from lockstep.agents.agent import configured_tools, default_environment
from lockstep.agents.hosts import EnvironmentFailed, LoopHost, ProcessHost, ThreadHost, check_turn, make_host
from lockstep.config.agent import AgentConfig
from lockstep.judging.sandbox import Result
from lockstep.utils.files import load_object

GAME = """
import os
from lockstep.agents import Environment, Turn

class Game(Environment):
    def __init__(self, name="x"):
        self.name = name
    def reset(self, row, seed):
        return Turn([{"role": "user", "content": f"{self.name} {seed}"}])
    def step(self, action):
        return Turn(reward=1.0, done=True, info={"pid": os.getpid()})
"""
TOOL = '''
def double(x: int) -> int:
    """Doubles.

    Args:
        x: A number.
    """
    return 2 * x
'''


@pytest.fixture
def file_of(tmp_path):
    def write(name, text):
        (tmp_path / name).write_text(text)
        return str(tmp_path / name)

    return write


def test_an_environment_and_tools_in_files_of_the_user_are_found_by_their_process(file_of):
    game, double = load_object(file_of("game.py", GAME), "Game"), load_object(file_of("tools.py", TOOL), "double")
    host = make_host(game, 30.0)
    assert isinstance(host, ProcessHost)
    try:
        assert host.begin(game, {"name": "chess"}, {}, 7).messages == [{"role": "user", "content": "chess 7"}]
        first = host.step(Action("a", "a")).info["pid"]
        host.close()  # a process that had to be killed is followed by another
        host.begin(game, {}, {}, 7)
        assert host.step(Action("a", "a")).info["pid"] != first
        host.begin(ToolEnvironment, {"tools": [Tool.of(double)]}, {"prompt": "?"}, 0)
        turn = host.step(Action("", "", (ToolCall("double", {"x": 4}),)))
        assert turn.messages == [{"role": "tool", "name": "double", "content": "8"}]
    finally:
        host.close()


def test_a_tool_of_a_schema_and_a_call_may_call_anything(file_of):
    text = """
from lockstep.agents import Tool
parameters = {"type": "object", "properties": {"x": {"type": "integer"}}}
triple = Tool("triple", {"type": "function", "function": {"name": "triple", "parameters": parameters}}, lambda x: 3 * x)
"""
    (tool,) = configured_tools(AgentConfig(tools=[f"{file_of('schema.py', text)}:triple"]))
    host = ProcessHost(30.0)
    try:
        host.begin(ToolEnvironment, {"tools": [tool]}, {"prompt": "?"}, 0)
        turn = host.step(Action("", "", (ToolCall("triple", {"x": 4}), ToolCall("triple", {"x": "a"}))))
        assert turn.messages[0]["content"] == "12"
        assert turn.faults == 1
    finally:
        host.close()


SLOW = """
import os, time
if "LOCKSTEP_KILLABLE_CHILD" in os.environ:
    time.sleep(2.0)
"""
SLOW_TOOL = """
from lockstep.agents import Tool
parameters = {"type": "object", "properties": {}}
tool = Tool("tool", {"type": "function", "function": {"name": "tool", "parameters": parameters}}, lambda: "called")
"""


@pytest.mark.parametrize("is_in", ["environment", "tool"])
def test_the_start_of_a_process_counts_against_no_deadline_and_is_no_time_of_the_environment(file_of, is_in):
    """Neither the import of the environment's file nor what its arguments need."""
    make, kwargs = ToolEnvironment, {}
    if is_in == "environment":
        make = load_object(file_of("slow.py", SLOW + GAME), "Game")
    else:
        kwargs = {"tools": configured_tools(AgentConfig(tools=[f"{file_of('slow_tool.py', SLOW + SLOW_TOOL)}:tool"]))}
    host = ProcessHost(1.0)
    try:
        host.begin(make, kwargs, {"prompt": "?"}, 0)
        assert host.seconds < 1.0
    finally:
        host.close()


def test_a_bounded_number_of_processes_start_at_a_time(file_of, monkeypatch):
    monkeypatch.setattr(hosts, "_starts", threading.BoundedSemaphore(2))
    text = SLOW.replace("2.0", "0.2") + GAME.replace('"pid": os.getpid()', '"began": BEGAN, "ended": time.monotonic()')
    text = text.replace("if ", "BEGAN = time.monotonic()\nif ", 1)
    game = load_object(file_of("game.py", text), "Game")
    several = [ProcessHost(30.0) for _ in range(6)]
    try:
        began = [host.starting(game, {}) for host in several]
        for waited in began:
            waited.result()
        imports = []
        for host in several:
            host.begin(game, {}, {}, 0)
            imports.append(host.step(Action("a", "a")).info["began"])
    finally:
        for host in several:
            host.close()
    imports.sort()
    # The third import begins when one of the first two has ended: with 6 processes and 2 at a time, 2 x 0.2 s lie between the ends.
    assert all(later - first >= 0.2 for first, later in zip(imports, imports[2:], strict=False))


def test_tools_of_the_config_and_of_a_class_do_not_import_transformers_in_their_process(file_of):
    """That takes seconds of processor time, in each of the processes of a batch."""
    text = TOOL.replace("def double(x: int) -> int", "import sys\ndef double(x: int) -> list").replace(
        "2 * x", '[2 * x, "torch" in sys.modules, "transformers" in sys.modules]'
    )
    path = file_of("tools.py", text)
    own = f"from lockstep.agents import ToolEnvironment\n{text}\nclass Own(ToolEnvironment):\n    tools = (double,)\n"
    for make, kwargs in (
        (ToolEnvironment, {"tools": configured_tools(AgentConfig(tools=[f"{path}:double"]))}),
        (load_object(file_of("own.py", own), "Own"), {}),
    ):
        host = make_host(make, 60.0)
        assert isinstance(host, ProcessHost)
        try:
            host.begin(make, kwargs, {"prompt": "?"}, 0)
            turn = host.step(Action("", "", (ToolCall("double", {"x": 4}), ToolCall("double", {"x": "a"}))))
        finally:
            host.close()
        assert turn.messages[0]["content"] == "[8, false, false]"
        assert turn.faults == 1


def test_a_program_that_waits_for_a_place_in_the_sandbox_is_not_late(monkeypatch):
    """Other programs of the policy's, which run to their own limit, have the places."""

    class Full:
        def run(self, program):
            time.sleep(1.0)
            return Result(status="ok", exit_code=0, stdout="42\n", stderr="", seconds=0.1)

    monkeypatch.setattr(shipped_tools, "_sandbox", Full)
    config = AgentConfig(tools=["python"])
    kind = default_environment(config)
    host = make_host(kind, 0.2)
    host.begin(kind, {"tools": configured_tools(config)}, {"prompt": "?"}, 0)
    turn = host.step(Action("", "", (ToolCall("python", {"code": "print(42)"}),)))
    assert turn.messages[0]["content"] == "42\n"


def test_an_environment_that_was_killed_is_not_started_again_to_be_closed(file_of):
    host = ProcessHost(3.0)
    game = load_object(
        file_of("game.py", GAME.replace("return Turn(reward", "__import__('time').sleep(60); return Turn(reward")), "Game"
    )
    try:
        host.begin(game, {}, {}, 7)
        with pytest.raises(EnvironmentFailed, match="did not end within"):
            host.step(Action("a", "a"))
        host.ending().result()
        assert not host._child._worker.is_running
    finally:
        host.close()


def test_a_file_that_cannot_be_imported_there_is_a_failure(file_of):
    path = file_of("game.py", GAME)
    game = load_object(path, "Game")
    file_of("game.py", "raise RuntimeError('not here')")
    host = ProcessHost(30.0)
    try:
        with pytest.raises(EnvironmentFailed, match="not here"):
            host.begin(game, {}, {}, 7)
    finally:
        host.close()


@pytest.mark.parametrize("kind", [ProcessHost, ThreadHost])
def test_async_tools_of_an_environment_share_an_event_loop(kind):
    """What one call connects, the next one uses."""
    host, action = kind(60.0), Action("", "", (ToolCall("ask", {}),))
    try:
        host.begin(Connects, {}, {"prompt": "?"}, 0)
        assert [host.step(action).messages[0]["content"] for _ in range(2)] == ["True", "True"]
        host.ending().result()
        host.begin(Connects, {}, {"prompt": "?"}, 0)
        assert host.step(action).messages[0]["content"] == "True"
        host.ending().result()
    finally:
        host.close()


class Late(Environment):
    """Answers when it may."""

    is_quick = True
    said: list[str]
    may, closed = threading.Event(), threading.Event()

    def step(self, action):
        assert self.may.wait(60)
        self.said.append("answered")
        return Turn(done=True)

    def close(self):
        self.said.append("closed")
        self.closed.set()


class LateInALoop(Late):
    async def step(self, action):
        try:
            await asyncio.sleep(1000)
        finally:
            await asyncio.sleep(0)
            self.said.append("cancelled")

    async def close(self):
        Late.close(self)


@pytest.mark.parametrize(("kind", "said"), [(Late, ["answered", "closed"]), (LateInALoop, ["cancelled", "closed"])])
def test_an_environment_that_is_late_is_closed_once_when_it_has_answered_or_is_cancelled(kind, said, monkeypatch):
    monkeypatch.setattr(kind, "said", [], raising=False)
    for name in ("may", "closed"):
        monkeypatch.setattr(kind, name, threading.Event())
    host = make_host(kind, 60.0)
    host.begin(kind, {}, {"prompt": "?"}, 0)
    waited = host.stepping(Action("a", "a"))
    waited.deadline = time.monotonic()
    with pytest.raises(EnvironmentFailed, match="did not answer within 60 s"):
        waited.result()
    host.ending().result()
    kind.may.set()
    assert kind.closed.wait(60)
    assert kind.said == said


class Blocks(Environment):
    """Waits in the event loop instead of awaiting, where the row says so."""

    begun, may = threading.Event(), threading.Event()

    async def reset(self, row, seed):
        if row.get("blocks"):
            self.begun.set()
            assert self.may.wait(60)
        return Turn([{"role": "user", "content": "?"}])

    async def step(self, action):
        return Turn(done=True)


def test_an_environment_that_blocks_the_event_loop_costs_those_that_begin_later_nothing(monkeypatch):
    monkeypatch.setattr(Blocks, "begun", threading.Event())
    monkeypatch.setattr(Blocks, "may", threading.Event())
    beside, blocking, later = (make_host(Blocks, 50.0) for _ in range(3))
    assert isinstance(later, LoopHost)
    beside.begin(Blocks, {}, {}, 0)
    waited = blocking.beginning(Blocks, {}, {"blocks": True}, 0)
    assert Blocks.begun.wait(50)
    monkeypatch.setattr(hosts, "_PATIENCE_S", 0.0)
    try:
        later.begin(Blocks, {}, {}, 0)
        assert later.step(Action("a", "a")).done
        assert not waited.future.done()
    finally:
        Blocks.may.set()
    assert waited.result().messages  # it goes on where it began, and so do those beside it
    assert beside.step(Action("a", "a")).done


def test_a_turn_has_pythons_own_numbers_and_text_whatever_the_environment_computes_with():
    """As they are recorded, so that a replay reads the same."""
    parts = [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]
    info = {"f": np.float32(0.25), "i": np.int64(3), "one": np.array([2.0]), "several": np.arange(3), 7: {"deep": np.bool_(True)}}
    given = Turn([{"role": "user", "content": parts}], np.float32(0.5), np.bool_(False), info)
    turn = check_turn(given)
    assert turn is given  # what is cut from it later is held by nobody
    assert (turn.messages, turn.reward, turn.done) == ([{"role": "user", "content": "a b"}], 0.5, False)
    assert turn.info == {"f": 0.25, "i": 3, "one": 2.0, "several": "array([0, 1, 2])", "7": {"deep": True}}
    assert json.loads(json.dumps([turn.reward, turn.done, turn.info])) == [turn.reward, turn.done, turn.info]


CIRCLE: dict[str, object] = {}
CIRCLE["self"] = CIRCLE


@pytest.mark.parametrize(
    ("turn", "message"),
    [
        (Turn([{"role": "user", "content": [{"type": "image", "image": "x.png"}]}]), "must be text"),
        (Turn(info=CIRCLE), "info JSON"),
        (Turn(info={(1, 2): 3}), "info JSON"),
        (Turn(done=np.array([True, False])), "true or false"),
        (Turn(info={"a": float("nan")}), "info JSON"),
        (Turn(info={"a": {"b": [np.float32("inf")]}}), "info JSON"),
        (Turn(info={"a": 10**400}), "info JSON"),
        (Turn(faults=float("inf")), "info JSON"),
        (Turn(reward=10**400), "finite number"),
        (Turn(reward=1e300), "finite number"),
        (Turn(reward=float("nan")), "finite number"),
    ],
)
def test_what_cannot_be_shown_or_recorded_is_the_environments_failure(turn, message):
    with pytest.raises(EnvironmentFailed, match=message):
        check_turn(turn)


def test_reset_must_begin_an_episode():
    first = [{"role": "user", "content": "?"}]
    for turn in (Turn(), Turn(first, done=True), Turn(first, reward=1.0)):
        with pytest.raises(EnvironmentFailed, match="the policy has said nothing yet"):
            check_turn(turn, is_first=True)
    assert check_turn(Turn(first, reward=0.0), is_first=True).messages == first
