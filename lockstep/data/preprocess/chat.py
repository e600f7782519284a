"""Conversations for supervised training: rows with `messages` ({role, content}) or ShareGPT's `conversations` ({from, value})."""

import json
from typing import Any

import pyarrow as pa

from lockstep.data.preprocess.recipe import Recipe, SourceRow, UnusableRow, WrittenRow

_ROLES = {
    "system": "system",
    **dict.fromkeys(("user", "human"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "model", "bot", "function_call"), "assistant"),
    **dict.fromkeys(("tool", "observation", "function_response"), "tool"),
}
_KEPT = {"name": pa.string(), "reasoning_content": pa.string(), "train": pa.bool_(), "weight": pa.float64()}
"""Fields of a message that are kept where they are there."""
_MESSAGE = pa.struct({"role": pa.string(), "content": pa.string(), "tool_calls": pa.string(), **_KEPT})


def convert(row: SourceRow, _: str) -> WrittenRow:
    """The messages with roles as templates know them; tools and calls of tools as JSON text, which Arrow leaves as it is."""
    turns = row.get("messages") or row.get("conversations") or row.get("conversation")
    if not isinstance(turns, list):
        raise UnusableRow("no column 'messages' or 'conversations' with a list")
    messages = [_message(turn) for turn in turns]
    if isinstance(row.get("system"), str) and row["system"].strip() and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": row["system"]}, *messages]
    roles = [message["role"] for message in messages if message["role"] != "system"]
    if "assistant" not in roles:
        raise UnusableRow("the assistant says nothing")
    if roles[0] == "assistant":
        raise UnusableRow("the conversation begins with the assistant")
    return WrittenRow(None, {"messages": messages, "tools": _json_text(row.get("tools"))}, {})


def _message(turn: Any) -> dict[str, Any]:
    if not isinstance(turn, dict):
        raise UnusableRow("a turn is not an object")
    who = turn.get("role", turn.get("from"))
    content = turn.get("content", turn.get("value"))
    if who not in _ROLES:
        raise UnusableRow(f"a turn of an unknown role: {who!r}")
    calls = _json_text(f"[{content}]" if who == "function_call" else turn.get("tool_calls") or None)
    content = "" if who == "function_call" or (content is None and calls) else content
    if not isinstance(content, str) or not (content.strip() or calls):
        raise UnusableRow("a turn is empty, or not text")
    if turn.get("weight") not in (None, 0, 1):
        raise UnusableRow("the weight of a turn is neither 0 nor 1")
    kept = {name: turn[name] for name in _KEPT if turn.get(name) is not None}
    return {"role": _ROLES[who], "content": content, "tool_calls": calls, **kept}


def _json_text(value: Any) -> str | None:
    """JSON text of the value; None for nothing. Raises UnusableRow for text that is not JSON.

    Fields of objects that are None are left out: Arrow gives each object the fields of all.
    """
    if isinstance(value, str) and value.strip():
        try:
            value = json.loads(value)
        except ValueError:
            raise UnusableRow("tools or a call are not JSON") from None
    else:
        value = _without_nulls(value)
    return json.dumps(value, ensure_ascii=False) if value else None


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nulls(field) for name, field in value.items() if field is not None}
    return [_without_nulls(part) for part in value] if isinstance(value, list) else value


RECIPE = Recipe(
    hub_id="chat",
    ability="chat",
    about="conversations as `messages`, or ShareGPT's `conversations`",
    convert=convert,
    columns={"messages": pa.list_(_MESSAGE), "tools": pa.string()},
    extra_info={},
    secondary=r"_gen-",
    has_prompt=False,
)
