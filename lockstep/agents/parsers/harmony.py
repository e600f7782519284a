"""gpt-oss's form: a response is several messages, each in a channel; a call is one in the commentary that names its recipient."""

import re
from collections.abc import Mapping
from typing import Any

from lockstep.agents.environment import Fault, ToolCall
from lockstep.agents.parsers.parsed import Parsed, read_call, read_json

_FORM = "<|channel|>commentary to=functions.name <|constrain|>json<|message|>{...}<|call|>"
_END = re.compile(r"<\|(?:end|call|return|start)\|>")
_RECIPIENT = re.compile(r"to=([^\s<]+)")


def parse_harmony(text: str, schemas: Mapping[str, dict[str, Any]]) -> Parsed:
    """See `lockstep.agents.parsers`. What the analysis says of calls is thought; a message with a recipient is a call in any channel. Text
    without any message is content."""
    if "<|channel|>" not in text and "<|message|>" not in text:
        return Parsed(_END.sub("", text).strip())
    content = []
    found = list[ToolCall | Fault]()
    for part in _END.split(text):
        header, mark, body = part.partition("<|message|>")
        recipient = _RECIPIENT.search(header)
        if recipient is None:
            content += [] if "analysis" in header else [body]
            continue
        if not mark:
            found.append(Fault(f"a tool call must be {_FORM}; <|message|> is missing"))
            continue
        name = recipient[1].removeprefix("functions.")
        value = read_json(body or "{}", _FORM)
        found.append(value if isinstance(value, Fault) else read_call({"name": name, "arguments": value}, _FORM))
    return Parsed.of("".join(content), found)
