"""Parsers of tool calls in responses, for the forms that models are trained on. Nothing is evaluated, and nothing is dropped in silence.

A parser reads the whole response, special tokens included. Text outside calls is content. A malformed call is a `Fault`, whose text the
policy gets back.

| name | models | form |
|---|---|---|
| hermes | Qwen2.5, Qwen3, Hermes; templates without tools | `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` |
| qwen_xml | Qwen3-Coder, Qwen3.5 | `<tool_call><function=f><parameter=a>1</parameter></function></tool_call>` |
| llama_json | Llama 3 | `{"name": ..., "parameters": {...}}`, maybe after `<|python_tag|>`, several with `;` between |
| pythonic | Llama 4, Olmo 3, LFM2 | `[f(a=1), g(b="x")]` |
| mistral | Mistral | `[TOOL_CALLS][{"name": ..., "arguments": {...}}]`, or `[TOOL_CALLS]f[ARGS]{...}` |
| harmony | gpt-oss | `<|channel|>commentary to=functions.f<|message|>{...}<|call|>` |
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.agents.environment import Fault, ToolCall
from lockstep.errors import ConfigError

Schemas = Mapping[str, dict[str, Any]]
"""Tool -> JSON schema of its parameters."""


@dataclass(frozen=True)
class Parsed:
    """The parts of a response."""

    content: str
    calls: tuple[ToolCall, ...] = ()
    faults: tuple[Fault, ...] = ()

    @classmethod
    def of(cls, content: str, found: Sequence[ToolCall | Fault]) -> Parsed:
        """Return content with the calls and the faults of `found`, each in order."""
        calls = tuple(each for each in found if isinstance(each, ToolCall))
        return cls(content.strip(), calls, tuple(each for each in found if isinstance(each, Fault)))


def _read_call(value: Any, form: str, arguments: str = "arguments") -> ToolCall | Fault:
    """Return the call of a JSON object with a name and `arguments`."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not isinstance(value.get(arguments, {}), dict):
        return Fault(f"a tool call must be {form}, not {json.dumps(value)[:200]}")
    if unknown := value.keys() - {"name", arguments, "id", "type"}:
        return Fault(f"a tool call must be {form}; it has no {', '.join(map(ascii, sorted(unknown)))}")
    return ToolCall(value["name"], value.get(arguments, {}))


def as_json(call: ToolCall) -> ToolCall | Fault:
    """Return the call, or a Fault if JSON cannot hold it: calls are recorded and shown to the policy again."""
    try:
        json.dumps([call.name, call.arguments], ensure_ascii=False, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:  # a set, bytes, an infinite number, half a character
        return Fault(f"the name and the arguments of a tool call must be JSON: {ascii(str(error))[1:-1]}")
    return call


def _read_json(text: str, form: str) -> Any:
    """Return the value of a JSON text, or a Fault."""
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        return Fault(f"a tool call must be {form}; this is no JSON ({error}): {text.strip()[:200]}")


def _refuse_constant(name: str) -> None:
    """Raise for NaN and Infinity, which Python's decoder would accept."""
    raise ValueError(f"{name} is not a JSON number")


# -- Calls as JSON objects: Hermes and Qwen, Llama 3, Mistral --------------------------------------------------------------


_HERMES_FORM = '<tool_call>{"name": "...", "arguments": {...}}</tool_call>'
_HERMES = re.compile(r"<tool_call>(.*?)(</tool_call>|(?=<tool_call>)|\Z)", re.DOTALL)
_LLAMA_FORM = '{"name": "...", "parameters": {...}}'
_LLAMA_NAME = re.compile(r'\{\s*"name"\s*:\s*"([^"]*)"')
_JSON_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)
_MISTRAL_FORM = '[TOOL_CALLS][{"name": "...", "arguments": {...}}]'
_MISTRAL_NAMED = re.compile(r"\s*([\w.-]+)\s*(?:\[CALL_ID\][^\[]*)?(?:\[ARGS\]|(?=\{))")


def parse_hermes(text: str, schemas: Schemas) -> Parsed:
    """Read JSON objects between `<tool_call>` and `</tool_call>`."""
    found: list[ToolCall | Fault] = []
    for match in _HERMES.finditer(text):
        if not match[2]:
            found.append(Fault(f"a tool call must be {_HERMES_FORM}; the end tag is missing"))
            continue
        value = _read_json(match[1], _HERMES_FORM)
        found.append(value if isinstance(value, Fault) else _read_call(value, _HERMES_FORM))
    return Parsed.of(_HERMES.sub("", text), found)


def parse_llama_json(text: str, schemas: Schemas) -> Parsed:
    """Read objects with a name and parameters (or arguments): the whole response, several with `;` between them, or inside prose.

    Any other object is an answer in JSON, unless `<|python_tag|>` or its first key shows that a call was meant.
    """
    before, tag, after = text.partition("<|python_tag|>")
    body = after if tag else text
    if not tag and not re.match(r'\s*\{\s*"(name|parameters|type)"', body):
        return _llama_calls_in_prose(text, schemas)
    found: list[ToolCall | Fault] = []
    place = 0
    while place < len(body):
        if body[place] in " \n\t\r;":
            place += 1
            continue
        try:
            value, place = _JSON_DECODER.raw_decode(body, place)
        except (ValueError, RecursionError) as error:
            found.append(Fault(f"a tool call must be {_LLAMA_FORM}; this is no JSON ({error}): {body[place : place + 200]}"))
            break
        found.append(_read_llama_call(value))
    if tag and not found:
        found.append(Fault(f"a tool call must be {_LLAMA_FORM}; nothing follows <|python_tag|>"))
    return Parsed.of(before if tag else "", found)


def _llama_calls_in_prose(text: str, schemas: Schemas) -> Parsed:
    """Read the objects that are calls. An object that names a tool but is no call is a fault; the rest is content."""
    content = ""
    found = list[ToolCall | Fault]()
    place = 0
    while (start := text.find("{", place)) >= 0:
        content += text[place:start]
        named = _LLAMA_NAME.match(text, start)
        is_meant = named is not None and named[1] in schemas
        try:
            value, place = _JSON_DECODER.raw_decode(text, start)
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
    return _read_call(value, _LLAMA_FORM, key)


def parse_mistral(text: str, schemas: Schemas) -> Parsed:
    """Read after `[TOOL_CALLS]` a list of objects, or for each call a name, `[ARGS]` and an object."""
    content, tag, body = text.partition("[TOOL_CALLS]")
    if not tag:
        return Parsed(text.strip())
    found: list[ToolCall | Fault] = []
    for part in body.split("[TOOL_CALLS]"):
        if match := _MISTRAL_NAMED.match(part):
            form = "[TOOL_CALLS]name[ARGS]{...}"
            value = _read_json(part[match.end() :], form)
            found.append(value if isinstance(value, Fault) else _read_call({"name": match[1], "arguments": value}, form))
            continue
        value = _read_json(part, _MISTRAL_FORM)
        if isinstance(value, Fault):
            found.append(value)
        else:
            values = value if isinstance(value, list) else [value]
            found += [_read_call(each, _MISTRAL_FORM) for each in values]
    return Parsed.of(content, found or [Fault(f"a tool call must be {_MISTRAL_FORM}; the list is empty")])


# -- Qwen3-Coder: tags around a function's name and its parameters, whose types only the schema knows ----------------------


_QWEN_FORM = "<tool_call><function=name><parameter=argument>value</parameter></function></tool_call>"
_QWEN_CALL = re.compile(
    r"<tool_call>(.*?)(</tool_call>|(?=<tool_call>)|\Z)|(<function=.*?)(</function>|(?=<tool_call>|<function=)|\Z)", re.DOTALL
)
"""Between tags; or a function without tags, as Qwen3-Coder sometimes writes it."""
_QWEN_FUNCTION = re.compile(r"\s*<function=([^>\s]+)>(.*)</function>\s*", re.DOTALL)
_QWEN_PARAMETER = re.compile(r"\s*<parameter=([^>\s]+)>(.*?)(</parameter>|(?=<parameter=)|\Z)\s*", re.DOTALL)


def parse_qwen_xml(text: str, schemas: Schemas) -> Parsed:
    """Read functions between `<tool_call>` and `</tool_call>`."""
    found = [_read_qwen_call(_qwen_body(match), schemas) for match in _QWEN_CALL.finditer(text)]
    return Parsed.of(_QWEN_CALL.sub("", text), found)


def _qwen_body(match: re.Match[str]) -> str | None:
    """Return the text between the tags of a call, or None if the end tag is missing."""
    if match[3] is not None:
        return match[0] if match[4] else None
    return match[1] if match[2] else None


def _read_qwen_call(body: str | None, schemas: Schemas) -> ToolCall | Fault:
    function = None if body is None else _QWEN_FUNCTION.fullmatch(body)
    if function is None:
        what = "the end tag is missing" if body is None else f"not {body.strip()[:200]}"
        return Fault(f"a tool call must be {_QWEN_FORM}; {what}")
    known = schemas.get(function[1], {}).get("properties", {})
    arguments = {}
    place = 0
    while place < len(function[2].rstrip()):
        parameter = _QWEN_PARAMETER.match(function[2], place)
        if parameter is None or not parameter[3]:
            return Fault(f"a tool call must be {_QWEN_FORM}; not {function[2][place : place + 200].strip()}")
        value = _qwen_value(parameter[1], parameter[2], known.get(parameter[1], {}))
        if isinstance(value, Fault):
            return value
        arguments[parameter[1]] = value
        place = parameter.end()
    return ToolCall(function[1], arguments)


def _qwen_value(name: str, text: str, schema: Mapping[str, Any]) -> Any:
    """Return the value of a parameter with this schema. Text stays text, without the line breaks around it."""
    text = text.removeprefix("\n").removesuffix("\n")
    kinds = schema.get("type", "string")
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if "string" in kinds:
        return text
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        if kinds == ["boolean"] and text.lower() in ("true", "false"):
            return text.lower() == "true"
        return Fault(f"the argument {name!r} must be {' or '.join(kinds)}, not {text[:200]}")


# -- Calls that look like Python, read as a syntax tree of names and literals; nothing is evaluated ------------------------


_PYTHON_FORM = '[name(argument="value"), ...]'
_PYTHON_TAGS = re.compile(
    r"(<\|python_start\|>|<\|tool_call_start\|>|<function_calls>)(.*?)(<\|python_end\|>|<\|tool_call_end\|>|</function_calls>|\Z)",
    re.DOTALL,
)
_JSON_WORDS = {"true": True, "false": False, "null": None}


def parse_pythonic(text: str, schemas: Schemas) -> Parsed:
    """Read calls between tags, or a response that is a list of calls. Olmo writes one call per line."""
    match = _PYTHON_TAGS.search(text)
    body = (match[2] if match else text).strip()
    if match is None and not re.match(r"\[\s*[A-Za-z_][\w.]*\s*\(", body):
        return Parsed(text.strip())
    if match is not None and not body.startswith("["):
        body = f"[{','.join(filter(str.strip, body.splitlines()))}]"
    content = _PYTHON_TAGS.sub("", text) if match else ""
    try:
        tree = ast.parse(body, mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        return Parsed.of(content, [Fault(f"tool calls must be {_PYTHON_FORM}; this is none ({error}): {body[:200]}")])
    elements = tree.elts if isinstance(tree, ast.List) else []
    return Parsed.of(
        content,
        [_read_python_call(element) for element in elements] or [Fault(f"tool calls must be {_PYTHON_FORM}, not {body[:200]}")],
    )


def _read_python_call(node: ast.expr) -> ToolCall | Fault:
    if not isinstance(node, ast.Call) or node.args or any(keyword.arg is None for keyword in node.keywords):
        return Fault(f"tool calls must be {_PYTHON_FORM}, arguments by name; not {ast.unparse(node)[:200]}")
    try:
        arguments = {str(keyword.arg): _literal(keyword.value) for keyword in node.keywords}
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return Fault(f"the arguments of a tool call must be plain values: {ast.unparse(node)[:200]}")
    return ToolCall(ast.unparse(node.func), arguments)


def _literal(node: ast.expr) -> Any:
    if isinstance(node, ast.Name) and node.id in _JSON_WORDS:  # JSON's words, which models mix in
        return _JSON_WORDS[node.id]
    return ast.literal_eval(node)


# -- gpt-oss: messages in channels; a call is a message that names its recipient -------------------------------------------


_HARMONY_FORM = "<|channel|>commentary to=functions.name <|constrain|>json<|message|>{...}<|call|>"
_HARMONY_END = re.compile(r"<\|(?:end|call|return|start)\|>")
_HARMONY_RECIPIENT = re.compile(r"to=([^\s<]+)")


def parse_harmony(text: str, schemas: Schemas) -> Parsed:
    """Read messages. A message with a recipient is a call in any channel; the analysis is dropped. Text without any message is content."""
    if "<|channel|>" not in text and "<|message|>" not in text:
        return Parsed(_HARMONY_END.sub("", text).strip())
    content = []
    found = list[ToolCall | Fault]()
    for part in _HARMONY_END.split(text):
        header, mark, body = part.partition("<|message|>")
        recipient = _HARMONY_RECIPIENT.search(header)
        if recipient is None:
            if "analysis" not in header:
                content.append(body)
            continue
        if not mark:
            found.append(Fault(f"a tool call must be {_HARMONY_FORM}; <|message|> is missing"))
            continue
        name = recipient[1].removeprefix("functions.")
        value = _read_json(body or "{}", _HARMONY_FORM)
        found.append(value if isinstance(value, Fault) else _read_call({"name": name, "arguments": value}, _HARMONY_FORM))
    return Parsed.of("".join(content), found)


# -- Choosing a parser -----------------------------------------------------------------------------------------------------


Parse = Callable[[str, Schemas], Parsed]
"""(response, schemas of the tools) -> content, calls, faults. A function of the user may take its place (agent.parser)."""


@dataclass(frozen=True)
class Parser:
    """The form in which a model writes its calls."""

    parse: Parse
    stop_tokens: tuple[str, ...] = ()
    """Special tokens that end a turn as the model's own end token does, if its vocabulary has them."""
    inner_tokens: tuple[str, ...] = ()
    """Special tokens that end only a part of a turn, although templates also write them at its end: the turn continues after them."""


PARSERS = {
    "hermes": Parser(parse_hermes),
    "qwen_xml": Parser(parse_qwen_xml),
    "llama_json": Parser(parse_llama_json, ("<|eom_id|>",)),
    "pythonic": Parser(parse_pythonic, ("<|eom_id|>",)),
    "mistral": Parser(parse_mistral),
    "harmony": Parser(parse_harmony, ("<|call|>", "<|return|>"), ("<|end|>",)),
}

_SIGNS = (
    ("harmony", "<|channel|>"),
    ("qwen_xml", "<function="),
    ("mistral", "[TOOL_CALLS]"),
    ("hermes", "<tool_call>"),
    ("pythonic", "<|python_start|>"),
    ("pythonic", "<function_calls>"),
    ("pythonic", "<|tool_call_start|>"),
    ("llama_json", "<|python_tag|>"),
    ("llama_json", "ipython"),
)


def detect_parser(chat_template: str) -> str:
    """Return the name of the parser for the form that a chat template shows; "hermes" if it shows no tool calls.

    Raise ConfigError for a form that no parser reads.
    """
    for name, sign in _SIGNS:
        if sign in chat_template:
            if name == "hermes" and "arg_key" in chat_template:
                break
            return name
    else:
        if "tool_calls" not in chat_template:
            return "hermes"
    raise ConfigError(
        f"agent.parser=auto finds none for the tool calls of this model's chat template; choose one of {', '.join(PARSERS)}, or give "
        "a function of your own as agent.parser=file.py:name"
    )
