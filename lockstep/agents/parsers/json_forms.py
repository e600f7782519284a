"""Calls that are JSON objects: Hermes and Qwen, Llama 3, Mistral."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from lockstep.agents.environment import Fault, ToolCall
from lockstep.agents.parsers.parsed import Parsed, read_call, read_json

Schemas = Mapping[str, dict[str, Any]]

_HERMES_FORM = '<tool_call>{"name": "...", "arguments": {...}}</tool_call>'
_HERMES = re.compile(r"<tool_call>(.*?)(</tool_call>|(?=<tool_call>)|\Z)", re.DOTALL)
_LLAMA_FORM = '{"name": "...", "parameters": {...}}'
_MISTRAL_FORM = '[TOOL_CALLS][{"name": "...", "arguments": {...}}]'
_NAMED = re.compile(r"\s*([\w.-]+)\s*(?:\[CALL_ID\][^\[]*)?\[ARGS\]")


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
    """A response that is an object with name and parameters, or several with `;` between them.

    One that begins with another object is an answer in JSON, no call, unless `<|python_tag|>` says that it is one.
    """
    before, tag, after = text.partition("<|python_tag|>")
    body = after if tag else text
    if not tag and not re.match(r'\s*\{\s*"(name|parameters|type)"', body):
        return Parsed(text.strip())
    found: list[ToolCall | Fault] = []
    decoder, place = json.JSONDecoder(), 0
    while place < len(body):
        if body[place] in " \n\t\r;":
            place += 1
            continue
        try:
            value, place = decoder.raw_decode(body, place)
        except (ValueError, RecursionError) as error:
            found.append(Fault(f"a tool call must be {_LLAMA_FORM}; this is no JSON ({error}): {body[place : place + 200]}"))
            break
        found.append(read_call(value, _LLAMA_FORM, "parameters"))
    if tag and not found:
        found.append(Fault(f"a tool call must be {_LLAMA_FORM}; nothing follows <|python_tag|>"))
    return Parsed.of(before if tag else "", found)


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
