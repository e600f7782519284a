"""Tool calls in the text of a response, in the forms that models are trained on. Nothing is evaluated; nothing is dropped in silence.

A parser reads the whole response, special tokens included. What is no call is content; what was meant as one and is none is a Fault,
which goes back to the policy as text.

| name | models | form |
|---|---|---|
| hermes | Qwen2.5, Qwen3, Hermes; templates without tools | `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` |
| qwen_xml | Qwen3-Coder, Qwen3.5 | `<tool_call><function=f><parameter=a>1</parameter></function></tool_call>` |
| llama_json | Llama 3 | `{"name": ..., "parameters": {...}}`, maybe after `<|python_tag|>`, several with `;` between |
| pythonic | Llama 4, Olmo 3, LFM2 | `[f(a=1), g(b="x")]` |
| mistral | Mistral | `[TOOL_CALLS][{"name": ..., "arguments": {...}}]`, or `[TOOL_CALLS]f[ARGS]{...}` |
| harmony | gpt-oss | `<|channel|>commentary to=functions.f<|message|>{...}<|call|>` |
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from lockstep.agents.environment import Fault, ToolCall
from lockstep.agents.parsers.harmony import parse_harmony
from lockstep.agents.parsers.json_forms import parse_hermes, parse_llama_json, parse_mistral
from lockstep.agents.parsers.parsed import Parsed
from lockstep.agents.parsers.pythonic import parse_pythonic
from lockstep.agents.parsers.qwen_xml import parse_qwen_xml
from lockstep.errors import ConfigError

Parse = Callable[[str, Mapping[str, dict[str, Any]]], Parsed]
"""(response, JSON schema of the parameters of each tool) -> content, calls, faults. A user's own is one too."""


@dataclass(frozen=True)
class Parser:
    """How a model writes its calls."""

    parse: Parse
    stop_tokens: tuple[str, ...] = ()
    """Special tokens that end a turn beside the model's own, where its vocabulary has them."""
    inner_tokens: tuple[str, ...] = ()
    """Special tokens that end a part of a turn, though templates write them at its end too: a turn goes on after them."""


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
    """The name of the parser whose form a chat template speaks of; "hermes" for one that speaks of none.

    Raises ConfigError for a form that none of the parsers reads.
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


__all__ = ["PARSERS", "Fault", "Parse", "Parsed", "Parser", "ToolCall", "detect_parser"]
