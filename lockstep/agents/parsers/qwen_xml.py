"""Qwen3-Coder's calls: tags around a function's name and its parameters, whose types only the schema knows."""

import json
import re
from collections.abc import Mapping
from typing import Any

from lockstep.agents.environment import Fault, ToolCall
from lockstep.agents.parsers.parsed import Parsed, refuse

_FORM = "<tool_call><function=name><parameter=argument>value</parameter></function></tool_call>"
_CALL = re.compile(
    r"<tool_call>(.*?)(</tool_call>|(?=<tool_call>)|\Z)|(<function=.*?)(</function>|(?=<tool_call>|<function=)|\Z)", re.DOTALL
)
"""Between tags; or a function that stands alone, as Qwen3-Coder writes it now and then."""
_FUNCTION = re.compile(r"\s*<function=([^>\s]+)>(.*)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"\s*<parameter=([^>\s]+)>(.*?)(</parameter>|(?=<parameter=)|\Z)\s*", re.DOTALL)


def parse_qwen_xml(text: str, schemas: Mapping[str, dict[str, Any]]) -> Parsed:
    """See `lockstep.agents.parsers`."""
    found = [_read(_body(match), schemas) for match in _CALL.finditer(text)]
    return Parsed.of(_CALL.sub("", text), found)


def _body(match: re.Match[str]) -> str | None:
    """What stands between the tags of a call; None where the last is missing."""
    if match[3] is not None:
        return match[0] if match[4] else None
    return match[1] if match[2] else None


def _read(body: str | None, schemas: Mapping[str, dict[str, Any]]) -> ToolCall | Fault:
    function = None if body is None else _FUNCTION.fullmatch(body)
    if function is None:
        what = "the end tag is missing" if body is None else f"not {body.strip()[:200]}"
        return Fault(f"a tool call must be {_FORM}; {what}")
    known = schemas.get(function[1], {}).get("properties", {})
    arguments = {}
    place = 0
    while place < len(function[2].rstrip()):
        parameter = _PARAMETER.match(function[2], place)
        if parameter is None or not parameter[3]:
            return Fault(f"a tool call must be {_FORM}; not {function[2][place : place + 200].strip()}")
        value = _value(parameter[1], parameter[2], known.get(parameter[1], {}))
        if isinstance(value, Fault):
            return value
        arguments[parameter[1]] = value
        place = parameter.end()
    return ToolCall(function[1], arguments)


def _value(name: str, text: str, schema: Mapping[str, Any]) -> Any:
    """The value that the text spells for a parameter of this schema. Text stays text, but for the line breaks around it."""
    text = text.removeprefix("\n").removesuffix("\n")
    kinds = schema.get("type", "string")
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if "string" in kinds:
        return text
    try:
        return json.loads(text, parse_constant=refuse)
    except (ValueError, RecursionError):
        if kinds == ["boolean"] and text.lower() in ("true", "false"):
            return text.lower() == "true"
        return Fault(f"the argument {name!r} must be {' or '.join(kinds)}, not {text[:200]}")
