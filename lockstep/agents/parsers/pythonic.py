"""Calls that look like Python: read as a syntax tree, of which only names and literal values are taken. Nothing is evaluated."""

import ast
import re
from collections.abc import Mapping
from typing import Any

from lockstep.agents.environment import Fault, ToolCall
from lockstep.agents.parsers.parsed import Parsed

_FORM = '[name(argument="value"), ...]'
_WRAPPED = re.compile(
    r"(<\|python_start\|>|<\|tool_call_start\|>|<function_calls>)(.*?)(<\|python_end\|>|<\|tool_call_end\|>|</function_calls>|\Z)",
    re.DOTALL,
)
_LITERALS = {"true": True, "false": False, "null": None}


def parse_pythonic(text: str, schemas: Mapping[str, dict[str, Any]]) -> Parsed:
    """Calls between tags, or a response that is a list of calls. Olmo's lines of calls are a list too."""
    match = _WRAPPED.search(text)
    body = (match[2] if match else text).strip()
    if match is None and not re.match(r"\[\s*[A-Za-z_][\w.]*\s*\(", body):
        return Parsed(text.strip())
    if match is not None and not body.startswith("["):
        body = f"[{','.join(filter(str.strip, body.splitlines()))}]"
    content = _WRAPPED.sub("", text) if match else ""
    try:
        tree = ast.parse(body, mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        return Parsed.of(content, [Fault(f"tool calls must be {_FORM}; this is none ({error}): {body[:200]}")])
    elements = tree.elts if isinstance(tree, ast.List) else []
    return Parsed.of(content, [_read(element) for element in elements] or [Fault(f"tool calls must be {_FORM}, not {body[:200]}")])


def _read(node: ast.expr) -> ToolCall | Fault:
    if not isinstance(node, ast.Call) or node.args or any(keyword.arg is None for keyword in node.keywords):
        return Fault(f"tool calls must be {_FORM}, arguments by name; not {ast.unparse(node)[:200]}")
    try:
        arguments = {str(keyword.arg): _literal(keyword.value) for keyword in node.keywords}
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return Fault(f"the arguments of a tool call must be plain values: {ast.unparse(node)[:200]}")
    return ToolCall(ast.unparse(node.func), arguments)


def _literal(node: ast.expr) -> Any:
    if isinstance(node, ast.Name) and node.id in _LITERALS:  # JSON's words, which models mix in
        return _LITERALS[node.id]
    return ast.literal_eval(node)
