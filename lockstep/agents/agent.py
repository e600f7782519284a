"""Agent: the environments, tools, parser and chat template that a configuration and its rows name, and the episodes of a batch.

`Agent.check` looks at everything before a model is loaded; `play_rows` is what a rollout worker does instead of `generate_sequences`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from lockstep.agents.chat_template import ConversationTemplate, TurnTemplate
from lockstep.agents.environment import Environment
from lockstep.agents.episode import Episode, episode_columns
from lockstep.agents.mcp_tools import mcp_tools
from lockstep.agents.parsers import PARSERS, Parse, Parser, detect_parser
from lockstep.agents.play import EpisodeLimits, EpisodeTask, Player
from lockstep.agents.recording import recorded_class
from lockstep.agents.search import search_tool
from lockstep.agents.shipped_tools import SANDBOX_QUEUE_S
from lockstep.agents.tools import Tool, ToolEnvironment, load_tool, tools_of
from lockstep.config.agent import AgentConfig
from lockstep.config.sampling import SamplingParams
from lockstep.errors import ConfigError, DataError
from lockstep.utils.files import load_object
from lockstep.utils.tokenizer import hf_tokenizer
from lockstep.workers.rollout.sampling import request_key

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from lockstep.config.ppo import PPOConfig
    from lockstep.protocol import DataProto
    from lockstep.workers.rollout.base import RolloutEngine

Kind = tuple[str | None, tuple[str, ...] | None]
"""A row's columns `environment` and `tools`."""

_SHIPPED_FUNCTIONS = {
    "python": "lockstep.agents.shipped_tools:python",
    "calculator": "lockstep.agents.shipped_tools:calculator",
}
SHIPPED = (*_SHIPPED_FUNCTIONS, "search")
"""Tools that have a short name."""


@dataclass(frozen=True)
class Agent:
    """Settings of episodes. Sent to the workers with each call."""

    config: AgentConfig
    model: str
    """Model whose tokenizer and chat template are used."""
    trust_remote_code: bool
    template_kwargs: dict[str, Any]
    max_prompt_length: int | None = None
    """Largest number of tokens of the first messages."""
    prompt_side: str | None = None
    """Side on which too long first messages are cut: see EpisodeLimits."""

    @property
    def renders_conversation(self) -> bool:
        """Whether the whole conversation is rendered before each turn."""
        return self.config.history == "template"

    @property
    def limits(self) -> EpisodeLimits:
        """The limits of an episode."""
        config = self.config
        # Recorded observations have been cut already.
        most = config.max_observation_tokens if config.recorded is None else None
        return EpisodeLimits(
            max_turns=config.max_turns,
            max_turn_tokens=config.max_turn_tokens,
            max_observation_tokens=most,
            max_environments=config.max_environments,
            step_timeout_s=config.step_timeout_s,
            episode_timeout_s=config.episode_timeout_s,
            retries=config.retries,
            max_prompt_tokens=self.max_prompt_length,
            prompt_side=self.prompt_side,
        )

    @property
    def parser(self) -> str:
        """Name of the form of tool calls."""
        return self.config.parser

    def environment_class(self, name: str | None = None) -> type[Environment]:
        """Return the class of a row's environments; `name` is the row's column `environment`."""
        if self.config.recorded is not None:
            return recorded_class(self.config.recorded, name)
        name = name or self.config.environment
        if name is None:
            return default_environment(self.config)
        return environment_class(name)

    def kind(self, name: str | None) -> dict[str, Any]:
        """Return what a replay needs of a row's environments: the tools that the policy sees, and whether the reward function judges."""
        kind = self.environment_class(name)
        tools = [tool.schema for tool in _tools(self, None, kind)]
        return {"tools": tools, "is_judged": kind.is_judged, "shows_prompt": _shows_prompt(kind)}

    def shown_prompt(self) -> Callable[[list[dict[str, Any]]], str] | None:
        """Return the function that renders a row's prompt and the tools as the start of an episode; None if episodes start otherwise."""
        if not _shows_prompt(self.environment_class()):
            return None
        return _template(self, None).start_text

    def check(self, kinds: Iterable[Kind] = ()) -> None:
        """Check everything that can be checked before a model is loaded; `kinds` are the kinds of the rows.

        Raise ConfigError for an environment, tool or parser that cannot be used, and for a template that cannot carry on a conversation;
        DataError for a row that names a missing tool.
        """
        default = _template(self, None)
        parser = _parser(self)
        checked_kinds: set[Kind] = {(None, None)}
        if self.config.recorded is None:
            checked_kinds.update(kinds)
        for name, tools in checked_kinds:
            kind = self.environment_class(name)
            if configured_tools(self.config) and not issubclass(kind, ToolEnvironment):
                raise ConfigError(
                    f"agent.tools and agent.mcp are called by a ToolEnvironment, and agent.environment={name or self.config.environment} "
                    "is none; make it a subclass of lockstep.agents.ToolEnvironment, or give it `tools` of its own"
                )
            if _template(self, tools, kind).has_tools and not default.has_tools and self.parser == "auto":
                found = detect_parser(str(_tokenizer(self).get_chat_template()))
                if PARSERS[found] is not parser:
                    raise ConfigError(f"agent.parser={found} must be set: {name} of the rows has tools, agent.environment has none")


def agent_of(config: PPOConfig) -> Agent:
    """Return the part of a configuration that episodes need."""
    model = config.actor_rollout_ref.model
    kwargs = dict(config.data.apply_chat_template_kwargs)
    side = None if config.data.truncation == "error" else config.data.truncation
    return Agent(config.agent, str(model.path), model.trust_remote_code, kwargs, config.data.max_prompt_length, side)


# -- The episodes of a batch -----------------------------------------------------------------------------------------------


def play_rows(
    engine: RolloutEngine,
    prompts: DataProto,
    sampling: SamplingParams,
    step: int,
    agent: Agent,
    on_finished: Callable[[Any], None] | None = None,
) -> DataProto:
    """Play an episode for each row. Reads prompts, index, sample and the columns that environments read; returns the columns of
    `episode_columns`.

    `on_finished` gets (row, token ids of the policy's last turn) of each episode as soon as it has ended.
    """
    parser = _parser(agent)
    tasks = [_task(agent, row, sampling.seed, step) for row in _rows(prompts)]
    stops = _token_ids(agent, parser.stop_tokens)
    inner = _token_ids(agent, parser.inner_tokens)
    sampling = replace(sampling, stop_token_ids=(*sampling.stop_token_ids, *sorted(stops - {*sampling.stop_token_ids})))

    def report(number: int, episode: Episode) -> None:
        if on_finished is not None and episode.error is None:
            on_finished((int(prompts.non_tensor_batch["row"][number]), torch.tensor(episode.last_turn)))

    episodes = Player(engine, _tokenizer(agent), parser.parse, sampling, agent.limits, inner).play(tasks, report)
    return episode_columns(episodes, has_contexts=agent.renders_conversation)


def _rows(prompts: DataProto) -> list[dict[str, Any]]:
    columns = prompts.non_tensor_batch
    ids = prompts.ragged("prompts").rows()
    rows = [{name: values[i] for name, values in columns.items()} | {"prompt_ids": ids[i].tolist()} for i in range(len(prompts))]
    return [row | {"prompt": row.get("raw_prompt")} for row in rows]


def _task(agent: Agent, row: dict[str, Any], seed: int, step: int) -> EpisodeTask:
    make = agent.environment_class(row.get("environment"))
    names = None if row.get("tools") is None else tuple(row["tools"])
    tools = _tools(agent, names, make)
    # Parquet gives every row the fields of all rows; missing ones are None.
    kwargs = {name: value for name, value in (row.get("env_kwargs") or {}).items() if value is not None}
    if issubclass(make, ToolEnvironment):
        kwargs.setdefault("tools", [tool for tool in configured_tools(agent.config) if names is None or tool.name in names])
    template = _template(agent, names, make)
    schemas = {tool.name: tool.schema["function"].get("parameters", {}) for tool in tools}
    key = (step, int(row["index"]), int(row["sample"]))
    chance = request_key(seed, (step, int(row["index"]), -1)) & 0x7FFFFFFF
    return EpisodeTask(row, row["prompt_ids"], key, chance, make, kwargs, template, schemas)


# -- Environments and tools by name ----------------------------------------------------------------------------------------


class ShippedTools(ToolEnvironment):
    """Calls tools that ship. They have deadlines of their own, so the environment needs no process."""

    is_quick = True
    queue_s = SANDBOX_QUEUE_S


def environment_class(name: str) -> type[Environment]:
    """Return the class that "file.py:Class" or "module:Class" names. Raise ConfigError if it is not an environment."""
    found = load_named("environment", name)
    if not (isinstance(found, type) and issubclass(found, Environment)):
        raise ConfigError(f"agent.environment={name} is {found!r}, not a subclass of lockstep.agents.Environment")
    if found.step is Environment.step:
        raise ConfigError(f"agent.environment={name} has no method step(action) that returns a Turn")
    return found


def _shows_prompt(kind: type[Environment]) -> bool:
    if kind.shows_prompt is not None:
        return kind.shows_prompt
    return kind.reset is Environment.reset


def default_environment(config: AgentConfig) -> type[Environment]:
    """Return the class for a configuration without agent.environment: it calls the configuration's tools."""
    if not config.mcp and all(name in SHIPPED for name in config.tools):
        return ShippedTools
    return ToolEnvironment


def configured_tools(config: AgentConfig) -> list[Tool]:
    """Return the tools of one episode. Raise ConfigError for a tool that cannot be used, and for a name that two tools have.

    Episodes that are played from a recording get no tools here: the recorded environment has them.
    """
    if config.recorded is not None:
        return []
    tools = [_tool(name, config.search_folder, config.search_results) for name in config.tools]
    for command in config.mcp:
        tools += mcp_tools(command, config.step_timeout_s)
    names = [tool.name for tool in tools]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"agent.tools and agent.mcp have more than one tool with the name {', '.join(twice)}")
    return tools


def load_named(key: str, name: str, shipped: tuple[str, ...] = ()) -> Any:
    """Return the object that "file.py:name" or "module:name" names. Raise ConfigError, with the `shipped` names, if it cannot be loaded."""
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
    path, attribute = _parts("tools", _SHIPPED_FUNCTIONS.get(name, name), SHIPPED)
    try:
        return load_tool(path, attribute)
    except DataError as error:
        raise ConfigError(f"agent.tools: {error}") from error


def _tools(agent: Agent, wanted: tuple[str, ...] | None, make: type[Environment]) -> tuple[Tool, ...]:
    """Return the tools of the configuration and the class; only the `wanted` ones if the row names some."""
    tools = (*configured_tools(agent.config), *tools_of(make))
    if wanted is None:
        return tools
    by_name = {tool.name: tool for tool in tools}
    if missing := [name for name in wanted if name not in by_name]:
        raise DataError(
            f"the column tools names {', '.join(missing)}; agent.tools and the environment have {', '.join(by_name) or 'none'}"
        )
    return tuple(by_name[name] for name in wanted)


# -- Chat template, parser and tokenizer, made once per process ------------------------------------------------------------


_templates: dict[Any, TurnTemplate] = {}


def _template(agent: Agent, wanted: tuple[str, ...] | None, make: type[Environment] | None = None) -> TurnTemplate:
    """Return the chat template for a set of tools."""
    make = make or agent.environment_class()
    tools = _tools(agent, wanted, make)
    key = (agent.model, repr(agent.template_kwargs), agent.renders_conversation, tuple(tool.name for tool in tools), make)
    if key not in _templates:
        tokenizer = _tokenizer(agent)
        stops = frozenset({tokenizer.eos_token_id} - {None})
        kind = ConversationTemplate if agent.renders_conversation else TurnTemplate
        _templates[key] = kind(tokenizer, agent.template_kwargs, [tool.schema for tool in tools], stops)
    return _templates[key]


def _parser(agent: Agent) -> Parser:
    name = agent.parser
    if name == "auto":
        tokenizer = _tokenizer(agent)
        template = _template(agent, None)
        name = detect_parser(str(tokenizer.get_chat_template())) if template.has_tools else "hermes"
    if name in PARSERS:
        return PARSERS[name]
    parse: Parse = load_named("parser", name, tuple(PARSERS))
    return Parser(parse)


def _token_ids(agent: Agent, tokens: Iterable[str]) -> set[int]:
    """Return the ids of the tokens that the vocabulary has."""
    vocabulary = _tokenizer(agent).get_vocab()
    return {vocabulary[token] for token in tokens if token in vocabulary}


def _tokenizer(agent: Agent) -> PreTrainedTokenizerBase:
    return _load_tokenizer(agent.model, agent.trust_remote_code)


@functools.cache
def _load_tokenizer(model: str, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    return hf_tokenizer(model, trust_remote_code=trust_remote_code)
