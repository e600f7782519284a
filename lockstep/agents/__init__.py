"""Agents: episodes of many turns, in which the policy talks to an environment or calls tools.

Users write an `Environment`, or functions that become a `Tool`; `lockstep.agents` also offers what the trainer and the workers call to play
episodes. The names below are loaded on first use.
"""

from typing import TYPE_CHECKING

from lockstep.utils.lazy import lazy_names

if TYPE_CHECKING:
    from lockstep.agents.environment import Action, Environment, Fault, ToolCall, Turn
    from lockstep.agents.named_tools import configured_tools
    from lockstep.agents.recorded import Recorder
    from lockstep.agents.rows import Agent, environment_class, episode_metrics, play_rows
    from lockstep.agents.tools import Tool, ToolEnvironment, ToolError
    from lockstep.agents.training import EpisodeRewards, EpisodeRollout, agent_of

__getattr__ = lazy_names(
    __name__,
    {
        "environment": "Action Environment Fault ToolCall Turn",
        "named_tools": "configured_tools",
        "recorded": "Recorder",
        "rows": "Agent environment_class episode_metrics play_rows",
        "tools": "Tool ToolEnvironment ToolError",
        "training": "EpisodeRewards EpisodeRollout agent_of",
    },
)
