"""Tools: functions that a policy may call, and the environment that calls them."""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Any

from lockstep.agents.environment import Action, Environment, Fault, Message, ToolCall, Turn
from lockstep.errors import ConfigError
from lockstep.utils.files import load_object

_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "object": (dict,),
    "array": (list,),
    "null": (type(None),),
}


class ToolError(Exception):
    """Raised by a tool for what the policy did wrong: its text is the result. Any other exception is the tool's own failure."""


@dataclass(frozen=True)
class Tool:
    """A function with the JSON schema that the policy is shown."""

    name: str
    schema: dict[str, Any]
    """{"type": "function", "function": {"name", "description", "parameters"}}."""
    function: Callable[..., Any]
    """Called with the arguments by name; sync or async. What it returns is the result: text (or its bytes) as it is, all else as JSON."""

    def __post_init__(self) -> None:
        function = self.schema.get("function") if isinstance(self.schema, dict) else None
        if (
            not isinstance(function, dict)
            or function.get("name") != self.name
            or not isinstance(function.get("parameters", {}), dict)
        ):
            form = f'{{"type": "function", "function": {{"name": "{self.name}", "description": "...", "parameters": {{...}}}}}}'
            raise ConfigError(f"the schema of the tool {self.name} must be {form}, not {str(self.schema)[:200]}")

    @classmethod
    def of(cls, given: Any) -> Tool:
        """A tool as it is, or of a Python function: the schema is its signature and docstring (Google style, every argument described).

        Raises ConfigError, saying what the function lacks.
        """
        if isinstance(given, Tool):
            return given
        if (sent := _sent_schemas.get(_name_of(given))) is not None:
            return cls(sent["function"]["name"], sent, given)
        from transformers.utils import get_json_schema
        from transformers.utils.chat_template_utils import DocstringParsingException, TypeHintParsingException

        try:
            schema = get_json_schema(given)
        except (DocstringParsingException, TypeHintParsingException, AttributeError, TypeError) as error:
            raise ConfigError(
                f"{getattr(given, '__name__', given)!r} cannot be a tool: {error}; it needs type hints and a docstring with a line for "
                "each argument under `Args:`, or give a Tool with a schema of its own"
            ) from error
        return cls(schema["function"]["name"], schema, given)

    def fault(self, arguments: Mapping[str, Any]) -> str | None:
        """What is wrong with the arguments, for the policy; None if nothing is."""
        parameters = self.schema["function"].get("parameters", {})
        known = parameters.get("properties", {})
        for name in parameters.get("required", ()):
            if name not in arguments:
                return f"{self.name} needs the argument {name!r}"
        for name, value in arguments.items():
            if name not in known:
                return f"{self.name} has no argument {name!r}; it has {', '.join(known) or 'none'}"
            if not _fits(value, known[name]):
                return f"the argument {name!r} of {self.name} must be {_type_names(known[name])}, not {json.dumps(value)[:200]}"
        return None


@dataclass(frozen=True)
class NamedTool(Tool):
    """A tool that another process loads again by its name in the configuration, so that it may call anything. The schema is sent along:
    making one from a function imports transformers, which takes seconds."""

    source: str = ""
    attribute: str = ""

    def __reduce__(self) -> tuple[Any, ...]:
        return load_tool, (self.source, self.attribute, self.schema)


def load_tool(path: str, attribute: str, schema: dict[str, Any] | None = None) -> NamedTool:
    """The tool that a file or a module defines as a function or a `Tool`; `schema` is the function's, where it is known.

    Raises DataError if it cannot be loaded, ConfigError if it cannot be a tool.
    """
    given = load_object(path, attribute)
    if isinstance(given, Tool) or schema is None:
        tool = Tool.of(given)
        return NamedTool(tool.name, tool.schema, tool.function, path, attribute)
    return NamedTool(schema["function"]["name"], schema, given, path, attribute)


_sent_schemas: dict[tuple[str, str], dict[str, Any]] = {}
"""Function -> its schema, as the process that started this one has made it."""


def learn_schemas(schemas: Mapping[tuple[str, str], dict[str, Any]]) -> None:
    """Called in the process of an environment: keep the schemas that its class's methods and functions have."""
    _sent_schemas.update(schemas)


@functools.cache
def schemas_of(kind: Any) -> dict[tuple[str, str], dict[str, Any]]:
    """What `learn_schemas` takes, for a class's own tools. Empty where they cannot be tools: making the environment says so."""
    try:
        return {_name_of(tool.function): tool.schema for tool in tools_of(kind)} if getattr(kind, "tools", ()) else {}
    except ConfigError:
        return {}


def _name_of(function: Any) -> tuple[str, str]:
    return str(getattr(function, "__module__", "")), str(getattr(function, "__qualname__", ""))


def _type_names(schema: Mapping[str, Any]) -> str:
    kinds = schema.get("type", [])
    kind = " or ".join([kinds] if isinstance(kinds, str) else kinds)
    return f"one of {schema['enum']}" if "enum" in schema else kind


def _fits(value: Any, schema: Mapping[str, Any]) -> bool:
    """Whether a value has the type that a schema asks for. What a schema says beyond type and enum is the tool's to check."""
    if "enum" in schema:
        return value in schema["enum"]
    kinds = schema.get("type", [])
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if value is None and schema.get("nullable"):
        return True
    if isinstance(value, bool) and "boolean" not in kinds and kinds:
        return False
    return not kinds or any(isinstance(value, _TYPES.get(kind, (object,))) for kind in kinds)


def tools_of(kind: type[Environment]) -> list[Tool]:
    """The tools of a class of environments, as the policy is told of them."""
    return [Tool.of(MethodType(getattr(kind, tool), kind) if isinstance(tool, str) else tool) for tool in kind.tools]


class ToolEnvironment(Environment):
    """Calls what the policy asks for and answers with the results; without a call the episode is over, and the reward judges it."""

    is_judged = True

    def __init__(self, tools: Sequence[Any] = ()) -> None:
        """`tools` beside those of the class."""
        own = [Tool.of(getattr(self, tool) if isinstance(tool, str) else tool) for tool in type(self).tools]
        self._by_name = {tool.name: tool for tool in (*own, *map(Tool.of, tools))}

    def step(self, action: Action) -> Turn | Awaitable[Turn]:
        """See Environment. The calls are made in order; async ones are awaited one after another."""
        if not action.calls and not action.faults:
            return Turn(done=True)
        results: list[str | Fault] = []
        for call in action.calls:
            result = self._call(call)
            if inspect.isawaitable(result):
                return self._answer_later(action, results, result)
            results.append(result)
        return self._answer(action, results)

    def close(self) -> None:
        """A tool whose function has a `close` of its own, as those of servers have, hears that the episode is over."""
        for tool in self._by_name.values():
            if hasattr(tool.function, "close"):
                tool.function.close()

    def _call(self, call: ToolCall) -> Any:
        """The result's text or a Fault, or what will become one of them."""
        tool = self._by_name.get(call.name)
        if tool is None:
            return Fault(f"there is no tool {call.name!r}; there are: {', '.join(self._by_name) or 'none'}")
        if (fault := tool.fault(call.arguments)) is not None:
            return Fault(fault)
        try:
            result = tool.function(**call.arguments)
        except ToolError as error:
            return Fault(str(error))
        return _awaited(result) if inspect.isawaitable(result) else _as_text(result)

    async def _answer_later(self, action: Action, results: list[str | Fault], result: Awaitable[str | Fault]) -> Turn:
        """The answer, with what the first calls have returned and what the next one will; those after it are made then."""
        results.append(await result)
        for call in action.calls[len(results) :]:
            made = self._call(call)
            results.append(await made if inspect.isawaitable(made) else made)
        return self._answer(action, results)

    def _answer(self, action: Action, results: Sequence[str | Fault]) -> Turn:
        messages: list[Message] = [
            {"role": "tool", "name": call.name, "content": _shown(result)}
            for call, result in zip(action.calls, results, strict=True)
        ]
        if action.faults:
            messages.append({"role": "user", "content": "\n".join(map(_shown, action.faults))})
        return Turn(messages, faults=sum(isinstance(result, Fault) for result in results))


async def _awaited(result: Awaitable[Any]) -> str | Fault:
    try:
        return _as_text(await result)
    except ToolError as error:
        return Fault(str(error))


def _shown(result: str | Fault) -> str:
    return f"error: {result.text}" if isinstance(result, Fault) else result


def _as_text(result: Any) -> str:
    if isinstance(result, bytes | bytearray):  # what programs print
        return result.decode(errors="replace")
    return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)
