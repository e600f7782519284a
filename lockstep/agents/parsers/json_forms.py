"""Calls that are JSON objects: Hermes and Qwen, Llama 3, Mistral."""

import json
import re
from collections.abc import Mapping
from typing import Any

from lockstep.agents.environment import Fault, ToolCall
from lockstep.agents.parsers.parsed import Parsed, read_call, read_json, refuse

Schemas = Mapping[str, dict[str, Any]]

_HERMES_FORM = '<tool_call>{"name": "...", "arguments": {...}}</tool_call>'
_HERMES = re.compile(r"<tool_call>(.*?)(</tool_call>|(?=<tool_call>)|\Z)", re.DOTALL)
_LLAMA_FORM = '{"name": "...", "parameters": {...}}'
_TOOL_NAME = re.compile(r'\{\s*"name"\s*:\s*"([^"]*)"')
_DECODER = json.JSONDecoder(parse_constant=refuse)
_MISTRAL_FORM = '[TOOL_CALLS][{"name": "...", "arguments": {...}}]'
_NAMED = re.compile(r"\s*([\w.-]+)\s*(?:\[CALL_ID\][^\[]*)?(?:\[ARGS\]|(?=\{))")


def parse_hermes(text: str, schemas: Schemas) -> Parsed:
    """JSON objects between `<tool_call>` and `</tool_call>`."""
    found: list[ToolCall | Fault] = []
    for match in _HERMES.finditer(text):
        if not match[2]:
            found.append(Fault(f"a tool call must be {_HERMES_FORM}; the end tag is missing"))
            continue
        value = read_json(match[1], _HERMES_FORM)
        found.append(value if isinstance(value, Fault) else read_call(value, _HERMES_FORM))
    return Parsed.of(_HERMES.sub("", text), found)


def parse_llama_json(text: str, schemas: Schemas) -> Parsed:
    """Objects with a name and parameters (or arguments): the whole response, several with `;` between them, or somewhere in prose.

    Another object is an answer in JSON, no call, unless `<|python_tag|>` or its first key says that it was meant as one.
    """
    before, tag, after = text.partition("<|python_tag|>")
    body = after if tag else text
    if not tag and not re.match(r'\s*\{\s*"(name|parameters|type)"', body):
        return _calls_in_prose(text, schemas)
    found: list[ToolCall | Fault] = []
    place = 0
    while place < len(body):
        if body[place] in " \n\t\r;":
            place += 1
            continue
        try:
            value, place = _DECODER.raw_decode(body, place)
        except (ValueError, RecursionError) as error:
            found.append(Fault(f"a tool call must be {_LLAMA_FORM}; this is no JSON ({error}): {body[place : place + 200]}"))
            break
        found.append(_read_llama_call(value))
    if tag and not found:
        found.append(Fault(f"a tool call must be {_LLAMA_FORM}; nothing follows <|python_tag|>"))
    return Parsed.of(before if tag else "", found)


def _calls_in_prose(text: str, schemas: Schemas) -> Parsed:
    """Objects that are calls; one that names a tool and is none is a fault; the rest is content."""
    content = ""
    found = list[ToolCall | Fault]()
    place = 0
    while (start := text.find("{", place)) >= 0:
        content += text[place:start]
        named = _TOOL_NAME.match(text, start)
        is_meant = named is not None and named[1] in schemas
        try:
            value, place = _DECODER.raw_decode(text, start)
        except (ValueError, RecursionError) as error:
            content = content + "{"
            place = start + 1
            if is_meant:
                found.append(Fault(f"a tool call must be {_LLAMA_FORM}; this is no JSON ({error}): {text[start : start + 200]}"))
            continue
        call = _read_llama_call(value) if is_meant or {"parameters", "arguments"} & value.keys() else None
        if isinstance(call, ToolCall) or (is_meant and call is not None):
            found.append(call)
        else:
            content += text[start:place]
    return Parsed.of(content + text[place:], found)


def _read_llama_call(value: Any) -> ToolCall | Fault:
    key = "arguments" if isinstance(value, dict) and "arguments" in value else "parameters"
    return read_call(value, _LLAMA_FORM, key)


def parse_mistral(text: str, schemas: Schemas) -> Parsed:
    """What follows `[TOOL_CALLS]`: a list of objects, or a name, `[ARGS]` and an object, as often as there are calls."""
    content, tag, body = text.partition("[TOOL_CALLS]")
    if not tag:
        return Parsed(text.strip())
    found: list[ToolCall | Fault] = []
    for part in body.split("[TOOL_CALLS]"):
        if match := _NAMED.match(part):
            value = read_json(part[match.end() :], "[TOOL_CALLS]name[ARGS]{...}")
            found.append(
                value
                if isinstance(value, Fault)
                else read_call({"name": match[1], "arguments": value}, "[TOOL_CALLS]name[ARGS]{...}")
            )
            continue
        value = read_json(part, _MISTRAL_FORM)
        if isinstance(value, Fault):
            found.append(value)
        else:
            found += [read_call(each, _MISTRAL_FORM) for each in (value if isinstance(value, list) else [value])]
    return Parsed.of(content, found or [Fault(f"a tool call must be {_MISTRAL_FORM}; the list is empty")])
