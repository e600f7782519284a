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
    """Raised by a tool for a mistake of the policy: its text is the result. Any other exception is a failure of the tool."""


@dataclass(frozen=True)
class Tool:
    """A function with the JSON schema that the policy is shown."""

    name: str
    schema: dict[str, Any]
    """{"type": "function", "function": {"name", "description", "parameters"}}."""
    function: Callable[..., Any]
    """Called with the arguments by name; sync or async. Returns the result: text or its bytes as they are, other values as JSON."""

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
        """Return a tool as it is, or make one from a Python function: the schema comes from its signature and docstring (Google style, with
        every argument).

        Raise ConfigError, naming what the function lacks.
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
        """Return what is wrong with the arguments, for the policy; None if they are right."""
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
    """A tool that another process loads by its name in the configuration, so that it may use objects that cannot be pickled. Its schema is
    sent along: making a schema from a function imports transformers, which takes seconds."""

    source: str = ""
    attribute: str = ""

    def __reduce__(self) -> tuple[Any, ...]:
        return load_tool, (self.source, self.attribute, self.schema)


def load_tool(path: str, attribute: str, schema: dict[str, Any] | None = None) -> NamedTool:
    """Return the tool that a file or a module defines as a function or a `Tool`; `schema` is the function's schema, if it is known.

    Raise DataError if it cannot be loaded, ConfigError if it cannot be a tool.
    """
    given = load_object(path, attribute)
    if isinstance(given, Tool) or schema is None:
        tool = Tool.of(given)
        return NamedTool(tool.name, tool.schema, tool.function, path, attribute)
    return NamedTool(schema["function"]["name"], schema, given, path, attribute)


_sent_schemas: dict[tuple[str, str], dict[str, Any]] = {}
"""Function -> its schema from the parent process."""


def learn_schemas(schemas: Mapping[tuple[str, str], dict[str, Any]]) -> None:
    """Keep the schemas of an environment's methods and functions. Called in the environment's process."""
    _sent_schemas.update(schemas)


@functools.cache
def schemas_of(kind: Any) -> dict[tuple[str, str], dict[str, Any]]:
    """Return the schemas of a class's tools for `learn_schemas`. Empty if they cannot be tools; making the environment raises then."""
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
    """Return whether a value has the type or is in the enum of a schema. The tool checks everything else."""
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
    """Return the tools that a class of environments shows to the policy."""
    return [Tool.of(MethodType(getattr(kind, tool), kind) if isinstance(tool, str) else tool) for tool in kind.tools]


class ToolEnvironment(Environment):
    """Makes the policy's calls and answers with the results. A turn without a call ends the episode, which the reward function judges."""

    is_judged = True

    def __init__(self, tools: Sequence[Any] = ()) -> None:
        """`tools` are added to the tools of the class."""
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
        """Close tools whose function has a method `close`, as tools of servers do."""
        for tool in self._by_name.values():
            if hasattr(tool.function, "close"):
                tool.function.close()

    def _call(self, call: ToolCall) -> Any:
        """Return the result's text or a Fault, or an awaitable of them."""
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
        """Return the answer from the results of the first calls and the awaitable of the next; make the remaining calls after it."""
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
