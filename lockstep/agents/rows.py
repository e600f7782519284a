"""Rows of a batch to episodes: what a rollout worker does where the run has environments or tools."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from lockstep.agents.bridge import Bridge
from lockstep.agents.environment import Environment
from lockstep.agents.episode import Episode, episode_columns
from lockstep.agents.named_tools import configured_tools, default_environment, load_named
from lockstep.agents.parsers import PARSERS, Parse, Parser, detect_parser
from lockstep.agents.play import Limits, Player, Task
from lockstep.agents.recorded import recorded_class
from lockstep.agents.rendered import TemplateBridge
from lockstep.agents.tools import Tool, ToolEnvironment, tools_of
from lockstep.config.agent import AgentConfig
from lockstep.config.sampling import SamplingParams
from lockstep.errors import ConfigError, DataError
from lockstep.utils.tokenizer import hf_tokenizer
from lockstep.workers.rollout.sampling import request_key

Kind = tuple[str | None, tuple[str, ...] | None]
"""What a row says of its episode: the columns environment and tools."""

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from lockstep.protocol import DataProto
    from lockstep.workers.rollout.base import RolloutEngine


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
    prompt_side: str | None = None
    """Where first messages that are too long are cut: see Limits."""

    @property
    def renders_anew(self) -> bool:
        """Whether the whole conversation is rendered before each turn."""
        return self.config.history == "template"

    @property
    def limits(self) -> Limits:
        """What an episode may use."""
        config = self.config
        # What was recorded was cut then.
        most = config.max_observation_tokens if config.recorded is None else None
        return Limits(
            config.max_turns, config.max_turn_tokens, most, config.max_environments, config.step_timeout_s,
            config.episode_timeout_s, config.retries, self.max_prompt_length, self.prompt_side,
        )  # fmt: skip

    @property
    def parser(self) -> str:
        """How calls are written."""
        return self.config.parser

    def environment_class(self, name: str | None = None) -> type[Environment]:
        """The class of a row's environments; `name` is what the row says."""
        if self.config.recorded is not None:
            return recorded_class(self.config.recorded, name)
        name = name or self.config.environment
        return default_environment(self.config) if name is None else environment_class(name)

    def kind(self, name: str | None) -> dict[str, Any]:
        """What a replay must know of a row's environments: what the policy is told of tools, and whether the reward function judges."""
        kind = self.environment_class(name)
        tools = [tool.schema for tool in _tools(self, None, kind)]
        return {"tools": tools, "is_judged": kind.is_judged, "shows_prompt": _shows_prompt(kind)}

    def shown_prompt(self) -> Callable[[list[dict[str, Any]]], str] | None:
        """What renders a row's prompt as the beginning of an episode, tools included; None where episodes begin with something else."""
        return _bridge(self, None).start_text if _shows_prompt(self.environment_class()) else None

    def check(self, kinds: Iterable[Kind] = ()) -> None:
        """Everything that can be known before a model is loaded; `kinds` are those of the rows.

        Raises ConfigError for an environment, tool or parser that cannot be used, and for a template that cannot carry on a conversation;
        DataError for a row's tool that is not there.
        """
        default = _bridge(self, None)
        parser = _parser(self)
        for name, tools in {(None, None), *(() if self.config.recorded is not None else kinds)}:
            kind = self.environment_class(name)
            if configured_tools(self.config) and not issubclass(kind, ToolEnvironment):
                raise ConfigError(
                    f"agent.tools and agent.mcp are called by a ToolEnvironment, and agent.environment={name or self.config.environment} "
                    "is none; make it a subclass of lockstep.agents.ToolEnvironment, or give it `tools` of its own"
                )
            if _bridge(self, tools, kind).has_tools and not default.has_tools and self.parser == "auto":
                found = detect_parser(str(_tokenizer(self).get_chat_template()))
                if PARSERS[found] is not parser:
                    raise ConfigError(f"agent.parser={found} must be set: {name} of the rows has tools, agent.environment has none")


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


def environment_class(name: str) -> type[Environment]:
    """The class that "file.py:Class" or "module:Class" names. Raises ConfigError for what is none."""
    found = load_named("environment", name)
    if not (isinstance(found, type) and issubclass(found, Environment)):
        raise ConfigError(f"agent.environment={name} is {found!r}, not a subclass of lockstep.agents.Environment")
    if found.step is Environment.step:
        raise ConfigError(f"agent.environment={name} has no method step(action) that returns a Turn")
    return found


def _shows_prompt(kind: type[Environment]) -> bool:
    return kind.reset is Environment.reset if kind.shows_prompt is None else kind.shows_prompt


def _rows(prompts: DataProto) -> list[dict[str, Any]]:
    columns = prompts.non_tensor_batch
    ids = prompts.ragged("prompts").rows()
    rows = [{name: values[i] for name, values in columns.items()} | {"prompt_ids": ids[i].tolist()} for i in range(len(prompts))]
    return [row | {"prompt": row.get("raw_prompt")} for row in rows]


def _task(agent: Agent, row: dict[str, Any], seed: int, step: int) -> Task:
    make = agent.environment_class(row.get("environment"))
    names = row.get("tools")
    tools = _tools(agent, None if names is None else tuple(names), make)
    # Parquet gives every row the fields of all, empty ones too.
    kwargs = {name: value for name, value in (row.get("env_kwargs") or {}).items() if value is not None}
    if issubclass(make, ToolEnvironment):
        kwargs.setdefault("tools", [tool for tool in configured_tools(agent.config) if names is None or tool.name in names])
    bridge = _bridge(agent, None if names is None else tuple(names), make)
    schemas = {tool.name: tool.schema["function"].get("parameters", {}) for tool in tools}
    key = (step, int(row["index"]), int(row["sample"]))
    chance = request_key(seed, (step, int(row["index"]), -1)) & 0x7FFFFFFF
    return Task(row, row["prompt_ids"], key, chance, make, kwargs, bridge, schemas)


def _tools(agent: Agent, wanted: tuple[str, ...] | None, make: type[Environment]) -> tuple[Tool, ...]:
    """The config's and the class's; only those that the row names, where it does."""
    tools = (*configured_tools(agent.config), *tools_of(make))
    if wanted is None:
        return tools
    by_name = {tool.name: tool for tool in tools}
    if missing := [name for name in wanted if name not in by_name]:
        raise DataError(
            f"the column tools names {', '.join(missing)}; agent.tools and the environment have {', '.join(by_name) or 'none'}"
        )
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
    parse: Parse = load_named("parser", name, tuple(PARSERS))
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
    """agent/*: means over the episodes that were played, how many were not, and how long generation had to wait for environments."""
    played = [episode for episode in episodes if episode["error"] is None]
    metrics = {"agent/missing": float(len(episodes) - len(played))}
    metrics["agent/wait_s"] = max(episode["wait_s"] for episode in episodes)
    if not played:
        return metrics
    for name in ("turns", "contexts", "calls", "faults", "environment_s", "retries"):
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
