"""Tools of MCP servers, with a real server process. What needs the extra mcp runs in `make test-mcp`."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

import psutil
import pytest

from lockstep.agents import Action, ToolCall, ToolEnvironment, ToolError
from lockstep.agents.agent import configured_tools
from lockstep.agents.hosts import EnvironmentFailed, ProcessHost
from lockstep.agents.mcp_tools import mcp_tools
from lockstep.config.agent import AgentConfig
from lockstep.errors import ConfigError, MissingExtra

SERVER = f"{sys.executable} {Path(__file__).parents[1] / 'helpers' / 'mcp_server.py'}"

try:
    import mcp  # noqa: F401
except ImportError:
    needs_mcp = pytest.mark.skip("needs the extra mcp")
else:
    needs_mcp = pytest.mark.filterwarnings("default")


def servers():
    return [p for p in psutil.Process().children(recursive=True) if any("mcp_server.py" in part for part in p.cmdline())]


def act(name, **arguments):
    return Action("", "", (ToolCall(name, arguments),))


@pytest.fixture
def tools():
    found = mcp_tools(SERVER, timeout_s=60.0)
    yield {tool.name: tool for tool in found}
    found[0].function.close()
    assert servers() == []


@needs_mcp
def test_tools_have_the_servers_schemas_and_share_a_process_that_the_first_call_starts(tools):
    assert list(tools) == ["add", "calls", "fails", "dies", "hangs"]
    assert tools["add"].schema["function"]["description"] == "Adds two numbers."
    assert tools["add"].fault({"b": 1}) == "add needs the argument 'a'"
    assert servers() == []
    assert tools["calls"].function() == "call 1"
    assert tools["add"].function(a=2, b=3) == "5"
    assert tools["calls"].function() == "call 2"
    assert len(servers()) == 1
    with pytest.raises(ToolError, match="no such thing"):
        tools["fails"].function()
    assert tools["calls"].function() == "call 3"


@needs_mcp
def test_a_dead_server_is_a_failure_and_a_copy_is_a_new_server(tools):
    assert tools["calls"].function() == "call 1"
    with pytest.raises(RuntimeError, match=r"the MCP server .*mcp_server.py' failed"):
        tools["dies"].function()
    assert servers() == []
    assert tools["calls"].function() == "call 1"
    add, calls = pickle.loads(pickle.dumps([tools["add"], tools["calls"]]))
    assert calls.function() == "call 1"
    assert add.function(a=1) == "2"
    assert len(servers()) == 2
    calls.function.close()


@needs_mcp
def test_an_environment_with_a_server_that_hangs_or_dies_fails_and_leaves_no_process():
    kwargs = {"tools": configured_tools(AgentConfig(mcp=[SERVER]))}
    host = ProcessHost(timeout_s=60.0)
    try:
        host.begin(ToolEnvironment, kwargs, {"prompt": "?"}, 0)
        assert host.step(act("calls")).messages[0]["content"] == "call 1"
        assert "no such thing" in host.step(act("fails")).messages[0]["content"]
        with pytest.raises(EnvironmentFailed, match="the MCP server"):
            host.step(act("dies"))
        host.ending().result()
        host.begin(ToolEnvironment, kwargs, {"prompt": "?"}, 0)
        assert host.step(act("calls")).messages[0]["content"] == "call 1"
        host._timeout_s = 0.5
        with pytest.raises(EnvironmentFailed, match="killed"):
            host.step(act("hangs"))
        assert servers() == []
    finally:
        host.close()


@needs_mcp
@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("/no/such/program", "cannot be started: FileNotFoundError"),
        (f"{SERVER} late", "cannot be started: it did not answer within 3 s"),
        (f"{sys.executable} -c 1", "cannot be started: MCPError"),
    ],
)
def test_a_server_that_cannot_be_asked_is_a_config_error(command, said):
    with pytest.raises(ConfigError, match=rf"agent\.mcp: .*{said}"):
        mcp_tools(command, timeout_s=3.0)
    assert servers() == []


@needs_mcp
def test_a_name_that_two_servers_have_is_refused():
    with pytest.raises(ConfigError, match="more than one tool with the name add"):
        configured_tools(AgentConfig(mcp=[SERVER, SERVER]))


def test_without_the_package_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "mcp", None)
    with pytest.raises(MissingExtra, match=r"lockstep-rl\[mcp\]"):
        mcp_tools("a-server", 1.0)
