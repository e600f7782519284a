import pytest

from lockstep.agents import ToolEnvironment
from lockstep.agents.agent import ShippedTools, configured_tools, default_environment
from lockstep.config.agent import AgentConfig
from lockstep.errors import ConfigError


def test_tools_are_named_by_the_config_and_those_that_ship_need_no_process(tmp_path):
    (tmp_path / "a.txt").write_text("Oslo")
    config = AgentConfig(tools=["python", "calculator", "search"], search_folder=str(tmp_path))
    assert [tool.name for tool in configured_tools(config)] == ["python", "calculator", "search"]
    assert default_environment(config) is ShippedTools
    assert default_environment(AgentConfig(tools=["python", "helpers.environments:add"])) is ToolEnvironment
    assert default_environment(AgentConfig(mcp=["server"])) is ToolEnvironment


@pytest.mark.parametrize(
    ("tools", "said"),
    [
        (["serch"], r"'serch' must be file.py:name or module:name, or one that ships: python, calculator, search"),
        (["no_such_file.py:f"], "no_such_file.py does not exist"),
        (["calculator", "lockstep.agents.shipped_tools:calculator"], "more than one tool with the name calculator"),
        (["search"], "agent.search_folder"),
    ],
)
def test_a_name_that_is_none_is_said_with_those_that_are(tools, said):
    with pytest.raises(ConfigError, match=said):
        configured_tools(AgentConfig(tools=tools))
