"""The tokens between turns, for the forms of public chat templates (tests/data/templates)."""

from __future__ import annotations

import pytest
from helpers.chat_templates import SCHEMAS, TEMPLATES, tokenizer_of

from lockstep.agents.bridge import Bridge
from lockstep.agents.environment import ToolCall
from lockstep.data.conversations import ChatTemplate
from lockstep.errors import ConfigError

REFUSED = {"falcon": "no special token", "glm4": "no special token", "mistral_v3": "depends on the turns before"}
"""Falcon has no token that ends a turn; Mistral moves the system message and the tools to the last question."""


@pytest.mark.parametrize("name", sorted(path.stem for path in TEMPLATES.glob("*.jinja")))
def test_what_follows_a_turn_is_what_the_template_writes_there(name):
    """Turn by turn, against the whole conversation rendered at once, where a template's earlier turns do not change."""
    tokenizer = tokenizer_of(name)
    if name in REFUSED:
        with pytest.raises(ConfigError, match=REFUSED[name]):
            Bridge(tokenizer, {})
        return
    bridge = Bridge(tokenizer, {})
    messages = [{"role": "user", "content": "one  two"}]
    ids = bridge.start(messages)
    for answer, question in (("alpha", "beta\n"), ("gamma", " delta"), ("epsilon", "zeta")):
        new = [{"role": "user", "content": question}]
        ids += tokenizer.encode(answer, add_special_tokens=False)
        ids += [bridge.end_of_turn(), *bridge.following(new)]
        messages += [{"role": "assistant", "content": answer}, *new]
        whole = ChatTemplate(tokenizer, {}).render(messages, add_generation_prompt=True)
        assert whole.endswith(tokenizer.decode(bridge.following(new)))
        if name in ("chatml", "smollm2", "qwen2_5", "llama3", "zephyr", "phi4", "granite", "gemma", "mistral", "command_r"):
            assert tokenizer.decode(ids) == whole


def test_results_of_tools_have_the_templates_own_form_or_the_users():
    qwen = tokenizer_of("qwen2_5")
    bridge = Bridge(qwen, {}, SCHEMAS)
    results = [{"role": "tool", "name": "add", "content": "3"}, {"role": "tool", "name": "add", "content": "4"}]
    call = ToolCall("add", {"a": 1, "b": 2})
    calls = [{"id": "0", "type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}] * 2
    asks = [{"role": "user", "content": "?"}]
    messages = [*asks, {"role": "assistant", "content": "", "tool_calls": calls}, *results]
    whole = qwen.apply_chat_template(messages, tools=SCHEMAS, tokenize=False, add_generation_prompt=True)
    assert bridge.has_tools
    assert bridge.has_several_calls
    assert whole.endswith("</tool_call><|im_end|>" + qwen.decode(bridge.following(results, [call, call])))

    smol = tokenizer_of("smollm2")
    bridge = Bridge(smol, {}, SCHEMAS)
    assert not bridge.has_tools
    first = smol.decode(bridge.start(asks))
    assert '"name": "add"' in first
    assert "<tool_call>" in first
    text = smol.decode(bridge.following(results, [call, call]))
    assert text == (
        "\n<|im_start|>user\n<tool_response>\n3\n</tool_response>\n<tool_response>\n4\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_tokenizer_without_a_template_is_refused():
    tokenizer = tokenizer_of("chatml")
    tokenizer.chat_template = None
    with pytest.raises(ConfigError, match="chat template"):
        Bridge(tokenizer, {})
