"""The tools that a configuration names: functions of the user, those that ship, those of MCP servers."""

import functools
from typing import Any

from lockstep.agents.environment import Environment
from lockstep.agents.mcp_tools import mcp_tools
from lockstep.agents.search import search_tool
from lockstep.agents.shipped_tools import SANDBOX_QUEUE_S
from lockstep.agents.tools import Tool, ToolEnvironment, load_tool
from lockstep.config.agent import AgentConfig
from lockstep.errors import ConfigError, DataError
from lockstep.utils.files import load_object

_FUNCTIONS = {
    "python": "lockstep.agents.shipped_tools:python",
    "calculator": "lockstep.agents.shipped_tools:calculator",
}
SHIPPED = (*_FUNCTIONS, "search")
"""Tools by a short name."""


class ShippedTools(ToolEnvironment):
    """Calls tools that ship. They end at deadlines of their own, so it needs no process."""

    is_quick = True
    queue_s = SANDBOX_QUEUE_S


def default_environment(config: AgentConfig) -> type[Environment]:
    """The class where the configuration names none: one that calls its tools."""
    return ShippedTools if not config.mcp and all(name in SHIPPED for name in config.tools) else ToolEnvironment


def configured_tools(config: AgentConfig) -> list[Tool]:
    """The tools of one episode. Raises ConfigError for one that cannot be used, and for a name that two of them have.

    None where episodes are played from a recording: there the environment has what the policy is told of.
    """
    if config.recorded is not None:
        return []
    tools = [_tool(name, config.search_folder, config.search_results) for name in config.tools]
    tools += [tool for command in config.mcp for tool in mcp_tools(command, config.step_timeout_s)]
    names = [tool.name for tool in tools]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"agent.tools and agent.mcp have more than one tool with the name {', '.join(twice)}")
    return tools


def load_named(key: str, name: str, shipped: tuple[str, ...] = ()) -> Any:
    """What "file.py:name" or "module:name" names. Raises ConfigError, with the names that would do too (`shipped`), where it is none."""
    path, attribute = _parts(key, name, shipped)
    try:
        return load_object(path, attribute)
    except DataError as error:
        raise ConfigError(f"agent.{key}: {error}") from error


def _parts(key: str, name: str, shipped: tuple[str, ...]) -> tuple[str, str]:
    path, colon, attribute = name.rpartition(":")
    if not colon:
        also = f", or one that ships: {', '.join(shipped)}" if shipped else ""
        raise ConfigError(f"agent.{key}: {name!r} must be file.py:name or module:name{also}")
    return path, attribute


@functools.cache
def _tool(name: str, search_folder: str | None, search_results: int) -> Tool:
    if name == "search":
        return search_tool(search_folder, search_results)
    path, attribute = _parts("tools", _FUNCTIONS.get(name, name), SHIPPED)
    try:
        return load_tool(path, attribute)
    except DataError as error:
        raise ConfigError(f"agent.tools: {error}") from error
