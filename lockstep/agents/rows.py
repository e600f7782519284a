"""Rows of a batch to episodes: what a rollout worker does where the run has environments or tools."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from lockstep.agents.bridge import Bridge
from lockstep.agents.environment import Environment
from lockstep.agents.episode import Episode, episode_columns
from lockstep.agents.parsers import PARSERS, Parse, Parser, detect_parser
from lockstep.agents.play import Limits, Player, Task
from lockstep.agents.rendered import TemplateBridge
from lockstep.agents.tools import Tool, ToolEnvironment, tools_of
from lockstep.config.agent import AgentConfig
from lockstep.config.sampling import SamplingParams
from lockstep.errors import ConfigError, DataError
from lockstep.utils.files import load_object
from lockstep.utils.tokenizer import hf_tokenizer
from lockstep.workers.rollout.counted import request_keys

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from lockstep.protocol import DataProto
    from lockstep.workers.rollout.base import RolloutEngine

SHIPPED = {
    "python": "lockstep.agents.shipped_tools:python",
    "calculator": "lockstep.agents.shipped_tools:calculator",
}
"""Tools by a short name."""


@dataclass(frozen=True)
class Agent:
    """What a worker needs to play episodes; sent with each call."""

    config: AgentConfig
    model: str
    """Whose tokenizer and chat template."""
    trust_remote_code: bool
    template_kwargs: dict[str, Any]
    max_prompt_length: int | None = None
    """Of the first messages, in tokens."""

    @property
    def renders_anew(self) -> bool:
        """Whether the whole conversation is rendered before each turn."""
        return self.config.history == "template"

    @property
    def limits(self) -> Limits:
        """What an episode may use."""
        config = self.config
        return Limits(
            config.max_turns, config.max_turn_tokens, config.max_observation_tokens, config.max_environments, config.step_timeout_s,
            config.episode_timeout_s, config.retries, self.max_prompt_length,
        )  # fmt: skip

    @property
    def tools(self) -> tuple[str, ...]:
        """Names of the tools that every environment has."""
        return tuple(self.config.tools)

    @property
    def parser(self) -> str:
        """How calls are written."""
        return self.config.parser

    def environment_class(self, name: str | None = None) -> type[Environment]:
        """The class of a row's environments; `name` is what the row says."""
        return environment_class(name or self.config.environment)

    def check(self) -> type[Environment]:
        """Everything that can be known before a model is loaded; returns the class of the environment.

        Raises ConfigError for an environment, tool or parser that cannot be used, and for a template that cannot carry on a conversation.
        """
        _parser(self)
        return self.environment_class()


def play_rows(
    engine: RolloutEngine,
    prompts: DataProto,
    sampling: SamplingParams,
    step: int,
    agent: Agent,
    on_finished: Callable[[Any], None] | None = None,
) -> DataProto:
    """An episode for each row. Reads prompts, index, sample and all that environments read; see `episode_columns` for what is written.

    `on_finished` gets (row, token ids of the policy's last turn) of each episode as soon as it has ended.
    """
    parser = _parser(agent)
    tasks = [_task(agent, row, sampling.seed, step) for row in _rows(prompts)]
    ends, inner = (
        {i for name in names if (i := _token_id(agent, name)) is not None} for names in (parser.stop_tokens, parser.inner_tokens)
    )
    sampling = replace(sampling, stop_token_ids=(*sampling.stop_token_ids, *sorted(ends - {*sampling.stop_token_ids})))

    def tell(number: int, episode: Episode) -> None:
        if on_finished is not None and episode.error is None:
            on_finished((int(prompts.non_tensor_batch["row"][number]), torch.tensor(episode.last_turn)))

    episodes = Player(engine, _tokenizer(agent), parser.parse, sampling, agent.limits, inner).play(tasks, tell)
    return episode_columns(episodes, has_contexts=agent.renders_anew)


def environment_class(name: str | None) -> type[Environment]:
    """The class that "file.py:Class" or "module:Class" names; None: the one that calls tools. Raises ConfigError for what is none."""
    if name is None:
        return ToolEnvironment
    found = _load("environment", name)
    if not (isinstance(found, type) and issubclass(found, Environment)):
        raise ConfigError(f"agent.environment={name} is {found!r}, not a subclass of lockstep.agents.Environment")
    return found


def _load(key: str, name: str) -> Any:
    path, colon, attribute = name.rpartition(":")
    if not colon:
        raise ConfigError(f"agent.{key}: {name!r} must be file.py:name or module:name")
    try:
        return load_object(path, attribute)
    except DataError as error:
        raise ConfigError(f"agent.{key}: {error}") from error


def _rows(prompts: DataProto) -> list[dict[str, Any]]:
    columns = prompts.non_tensor_batch
    ids = prompts.ragged("prompts").rows()
    rows = [{name: values[i] for name, values in columns.items()} | {"prompt_ids": ids[i].tolist()} for i in range(len(prompts))]
    return [row | {"prompt": row.get("raw_prompt")} for row in rows]


def _task(agent: Agent, row: dict[str, Any], seed: int, step: int) -> Task:
    make = agent.environment_class(row.get("environment"))
    names = row.get("tools")
    tools = _tools(agent, None if names is None else tuple(names), make)
    kwargs = dict(row.get("env_kwargs") or {})
    if issubclass(make, ToolEnvironment):
        kwargs.setdefault("tools", list(_named_tools(agent.tools)))
    bridge = _bridge(agent, None if names is None else tuple(names), make)
    schemas = {tool.name: tool.schema["function"].get("parameters", {}) for tool in tools}
    key = (step, int(row["index"]), int(row["sample"]))
    chance = int(request_keys(seed, [(step, int(row["index"]), -1)])[0]) & 0x7FFFFFFF
    return Task(row, row["prompt_ids"], key, chance, make, kwargs, bridge, schemas)


@functools.cache
def _named_tools(names: tuple[str, ...]) -> tuple[Tool, ...]:
    return tuple(Tool.of(_load("tools", SHIPPED.get(name, name))) for name in names)


def _tools(agent: Agent, wanted: tuple[str, ...] | None, make: type[Environment]) -> tuple[Tool, ...]:
    """The config's and the class's; only those that the row names, where it does."""
    tools = (*_named_tools(agent.tools), *tools_of(make))
    if wanted is None:
        return tools
    by_name = {tool.name: tool for tool in tools}
    if missing := [name for name in wanted if name not in by_name]:
        raise DataError(f"a row names the tools {missing}, agent.tools has {', '.join(by_name) or 'none'}")
    return tuple(by_name[name] for name in wanted)


_bridges: dict[Any, Bridge] = {}


def _bridge(agent: Agent, wanted: tuple[str, ...] | None, make: type[Environment] | None = None) -> Bridge:
    """One for each set of tools."""
    make = make or agent.environment_class()
    tools = _tools(agent, wanted, make)
    key = (agent.model, repr(agent.template_kwargs), agent.renders_anew, tuple(tool.name for tool in tools), make)
    if key not in _bridges:
        tokenizer = _tokenizer(agent)
        stops = frozenset({tokenizer.eos_token_id} - {None})
        kind = TemplateBridge if agent.renders_anew else Bridge
        _bridges[key] = kind(tokenizer, agent.template_kwargs, [tool.schema for tool in tools], stops)
    return _bridges[key]


def _parser(agent: Agent) -> Parser:
    name = agent.parser
    if name == "auto":
        tokenizer = _tokenizer(agent)
        bridge = _bridge(agent, None)
        name = detect_parser(str(tokenizer.get_chat_template())) if bridge.has_tools else "hermes"
    if name in PARSERS:
        return PARSERS[name]
    parse: Parse = _load("parser", name)
    return Parser(parse)


def _token_id(agent: Agent, token: str) -> int | None:
    vocabulary = _tokenizer(agent).get_vocab()
    return vocabulary.get(token)


def _tokenizer(agent: Agent) -> PreTrainedTokenizerBase:
    return _load_tokenizer(agent.model, agent.trust_remote_code)


@functools.cache
def _load_tokenizer(model: str, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    return hf_tokenizer(model, trust_remote_code=trust_remote_code)


def episode_metrics(episodes: Sequence[dict[str, Any]]) -> dict[str, float]:
    """agent/*: means over the episodes that were played, and how many were not."""
    played = [episode for episode in episodes if episode["error"] is None]
    metrics = {"agent/missing": float(len(episodes) - len(played))}
    if not played:
        return metrics
    for name in ("turns", "contexts", "calls", "environment_s", "retries"):
        metrics[f"agent/{name}"] = sum(episode[name] for episode in played) / len(played)
    goes_on = sum(episode["turns"] - 1 for episode in played)
    metrics["agent/broken_prefix_ratio"] = sum(episode["contexts"] - 1 for episode in played) / goes_on if goes_on else 0.0
    calls, faults = (sum(episode[name] for episode in played) for name in ("calls", "faults"))
    metrics["agent/bad_call_ratio"] = faults / (calls + faults) if calls + faults else 0.0
    infos = [episode["info"] for episode in played]
    for name in sorted({name for info in infos for name in info}):
        values = [float(info[name]) for info in infos if isinstance(info.get(name), int | float)]
        if values:
            metrics[f"agent/info/{name}"] = sum(values) / len(values)
    return metrics
