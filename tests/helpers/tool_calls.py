"""Tool calls as models write them, in every form that a parser reads."""

import json

SCHEMAS = {
    "f": {"properties": {"a": {"type": "integer"}, "s": {"type": "string"}, "x": {"type": "object"}}},
    "g": {"properties": {}},
}
ARGUMENTS = {"a": 3, "s": 'say "hi", <b> and é', "x": {"k": [1, None, True]}}


def xml(name, arguments):
    values = {k: v if isinstance(v, str) else json.dumps(v) for k, v in arguments.items()}
    inner = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in values.items())
    return f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>"


def python(name, arguments):
    inner = ", ".join(f"{k}={v!r}" for k, v in arguments.items())
    return f"{name}({inner})"


WRITE = {
    "hermes": lambda calls: "\n".join(f"<tool_call>\n{json.dumps({'name': n, 'arguments': a})}\n</tool_call>" for n, a in calls),
    "qwen_xml": lambda calls: "\n".join(xml(n, a) for n, a in calls),
    "llama_json": lambda calls: "<|python_tag|>" + "; ".join(json.dumps({"name": n, "parameters": a}) for n, a in calls),
    "pythonic": lambda calls: f"[{', '.join(python(n, a) for n, a in calls)}]",
    "mistral": lambda calls: "[TOOL_CALLS] " + json.dumps([{"name": n, "arguments": a, "id": "a" * 9} for n, a in calls]),
    "harmony": lambda calls: "".join(
        f"<|start|>assistant<|channel|>commentary to=functions.{n} <|constrain|>json<|message|>{json.dumps(a)}<|call|>"
        for n, a in calls
    ),
}


def mutated(text, chance):
    """The text with some characters taken out or put in."""
    for _ in range(chance.randint(1, 4)):
        place = chance.randrange(len(text))
        text = (
            text[:place] + chance.choice(["", "{", "}", '"', "<", "(", ")", "]", "\n", "é"]) + text[place + chance.randint(0, 2) :]
        )
    return text
