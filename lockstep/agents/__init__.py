"""Episodes of many turns: what a user writes (`Environment`, `Tool`), and what puts its messages between the policy's tokens."""

from lockstep.agents.environment import Action, Environment, Fault, ToolCall, Turn
from lockstep.agents.tools import Tool, ToolEnvironment, ToolError

__all__ = ["Action", "Environment", "Fault", "Tool", "ToolCall", "ToolEnvironment", "ToolError", "Turn"]
