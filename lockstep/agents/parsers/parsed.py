"""What a parser finds, and what all parsers share."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.agents.environment import Fault, ToolCall


@dataclass(frozen=True)
class Parsed:
    """A response, read."""

    content: str
    calls: tuple[ToolCall, ...] = ()
    faults: tuple[Fault, ...] = ()

    @classmethod
    def of(cls, content: str, found: Sequence[ToolCall | Fault]) -> Parsed:
        """Calls and faults apart, each in order."""
        calls = tuple(each for each in found if isinstance(each, ToolCall))
        return cls(content.strip(), calls, tuple(each for each in found if isinstance(each, Fault)))


def read_call(value: Any, form: str, arguments: str = "arguments") -> ToolCall | Fault:
    """A call of a JSON object with a name and `arguments`."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not isinstance(value.get(arguments, {}), dict):
        return Fault(f"a tool call must be {form}, not {json.dumps(value)[:200]}")
    if unknown := value.keys() - {"name", arguments, "id", "type"}:
        return Fault(f"a tool call must be {form}; it has no {', '.join(map(ascii, sorted(unknown)))}")
    return ToolCall(value["name"], value.get(arguments, {}))


def as_json(call: ToolCall) -> ToolCall | Fault:
    """The call, where JSON can hold it: it is recorded, and shown to the policy again."""
    try:
        json.dumps([call.name, call.arguments], ensure_ascii=False, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:  # a set, bytes, an infinite number, half a character
        return Fault(f"the name and the arguments of a tool call must be JSON: {ascii(str(error))[1:-1]}")
    return call


def read_json(text: str, form: str) -> Any:
    """The value that a text spells, or a Fault."""
    try:
        return json.loads(text, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        return Fault(f"a tool call must be {form}; this is no JSON ({error}): {text.strip()[:200]}")


def refuse(name: str) -> None:
    """For a decoder of JSON: NaN and Infinity are none."""
    raise ValueError(f"{name} is not a JSON number")
