"""Agents: episodes of many turns, in which the policy talks to an environment or calls tools.

Users write an `Environment`, or functions that become a `Tool`; `lockstep.agents` also offers what the trainer and the workers call to play
episodes. The names below are loaded on first use.
"""

from typing import TYPE_CHECKING

from lockstep.utils.lazy import lazy_names

if TYPE_CHECKING:
    from lockstep.agents.agent import Agent, agent_of, configured_tools, environment_class, play_rows
    from lockstep.agents.chat_template import ConversationTemplate, TurnTemplate
    from lockstep.agents.environment import Action, Environment, Fault, ToolCall, Turn
    from lockstep.agents.episode import episode_metrics
    from lockstep.agents.parsers import Parsed
    from lockstep.agents.recording import Recorder
    from lockstep.agents.tools import Tool, ToolEnvironment, ToolError
    from lockstep.agents.training import EpisodeRewards, EpisodeRollout

__getattr__ = lazy_names(
    __name__,
    {
        "agent": "Agent agent_of configured_tools environment_class play_rows",
        "chat_template": "ConversationTemplate TurnTemplate",
        "environment": "Action Environment Fault ToolCall Turn",
        "episode": "episode_metrics",
        "parsers": "Parsed",
        "recording": "Recorder",
        "tools": "Tool ToolEnvironment ToolError",
        "training": "EpisodeRewards EpisodeRollout",
    },
)
