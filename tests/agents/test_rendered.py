"""Conversations that are rendered anew before each turn."""

from __future__ import annotations

import json

import pytest
from helpers.chat_templates import SCHEMAS, TEMPLATES, tokenizer_of

from lockstep.agents.bridge import Bridge
from lockstep.agents.environment import Action, ToolCall
from lockstep.agents.rendered import TemplateBridge
from lockstep.data.conversations import ChatTemplate

ASKS = {"role": "user", "content": "one  two"}
MORE = {"role": "user", "content": "and?"}
THINKS = "<think>\nHm.\n</think>\n\nalpha"


def said(text, content=None, calls=(), **changes):
    return Action(text, text if content is None else content, calls, **changes)


def sampled(tokenizer, text, end="<|im_end|>"):
    """A text as a policy writes it: letter by letter, which no tokenizer would."""
    ids = [i for character in text for i in tokenizer.encode(character, add_special_tokens=False)]
    return [*ids, tokenizer.convert_tokens_to_ids(end)] if end else ids


@pytest.mark.parametrize("name", sorted(path.stem for path in TEMPLATES.glob("*.jinja")))
def test_every_template_can_be_rendered_anew_and_the_policy_sees_what_it_writes(name):
    """What stands in the context is the template's text of the conversation, whether it goes on or begins anew."""
    tokenizer = tokenizer_of(name)
    bridge, template = TemplateBridge(tokenizer, {}), ChatTemplate(tokenizer, {})
    end = tokenizer.convert_ids_to_tokens(min(bridge.end_ids)) if bridge.end_ids else "</s>"
    conversation, messages = [ASKS], [ASKS]
    context = bridge.start([ASKS])
    for answer in ("alpha", "gamma"):
        context = context + sampled(tokenizer, answer, end)
        conversation += [said(answer), MORE]
        messages = [*messages, {"role": "assistant", "content": bridge._begun + answer}, MORE]
        new, is_new = bridge.next_tokens(conversation, context)
        context = new if is_new else context + new
        assert tokenizer.decode(context) == template.render(messages, add_generation_prompt=True)


def test_a_prefix_that_stays_is_gone_on_from_with_the_tokens_that_were_sampled():
    tokenizer = tokenizer_of("chatml")
    tokenizer.add_tokens(["alpha"])  # the tokenizer would write one token where the policy wrote five
    bridge = TemplateBridge(tokenizer, {})
    context = bridge.start([ASKS]) + sampled(tokenizer, "alpha")
    new, is_new = bridge.next_tokens([ASKS, said("alpha"), MORE], context)
    assert (new, is_new) == (Bridge(tokenizer, {}).following([MORE]), False)
    cut = bridge.start([ASKS]) + sampled(tokenizer, "alpha", end=None)
    new, is_new = bridge.next_tokens([ASKS, said("alpha", is_cut=True), MORE], cut)
    assert not is_new
    assert tokenizer.decode(new).startswith("<|im_end|>\n<|im_start|>user\nand?")


def test_thinking_that_is_dropped_breaks_the_prefix_once_a_question_follows_and_not_before():
    """The form of Qwen3: an answer keeps its thinking until the next question; results of tools are none."""
    tokenizer = tokenizer_of("qwen3")
    bridge = TemplateBridge(tokenizer, {})
    context = bridge.start([ASKS]) + sampled(tokenizer, THINKS)
    new, is_new = bridge.next_tokens([ASKS, said(THINKS), MORE], context)
    assert is_new
    assert "Hm." not in tokenizer.decode(new)
    assert "alpha<|im_end|>" in tokenizer.decode(new)
    new, is_new = bridge.next_tokens([ASKS, said(THINKS), {"role": "system", "content": "go on"}], context)
    assert not is_new
    # What the generation prompt supplies goes too.
    without = TemplateBridge(tokenizer, {"enable_thinking": False})
    context = without.start([ASKS]) + sampled(tokenizer, "alpha")
    assert without.next_tokens([ASKS, said("alpha"), MORE], context)[1]


def test_thinking_that_the_generation_prompt_has_begun_belongs_to_the_answer():
    tokenizer = tokenizer_of("chatml")
    tokenizer.chat_template = tokenizer.chat_template.replace("assistant\\n'", "assistant\\n<think>\\n'")
    bridge = TemplateBridge(tokenizer, {})
    context = bridge.start([ASKS])
    assert tokenizer.decode(context).endswith("<think>\n")
    context += sampled(tokenizer, "Hm.\n</think>\n\nalpha")
    new, is_new = bridge.next_tokens([ASKS, said("Hm.\n</think>\n\nalpha"), MORE], context)
    assert not is_new
    assert tokenizer.decode(new) == "\n<|im_start|>user\nand?<|im_end|>\n<|im_start|>assistant\n<think>\n"


def test_a_template_that_moves_messages_breaks_every_prefix():
    """Mistral's shows the system message before the last question only."""
    tokenizer = tokenizer_of("mistral_v3")
    bridge = TemplateBridge(tokenizer, {})
    system = {"role": "system", "content": "Be brief."}
    context = bridge.start([system, ASKS]) + sampled(tokenizer, "alpha", "</s>")
    new, is_new = bridge.next_tokens([system, ASKS, said("alpha"), MORE], context)
    assert is_new
    assert tokenizer.decode(new).index("alpha") < tokenizer.decode(new).index("Be brief.")


def test_calls_are_shown_as_they_were_written_where_that_is_the_templates_form_too():
    tokenizer = tokenizer_of("qwen2_5")
    bridge = TemplateBridge(tokenizer, {}, SCHEMAS)
    call = ToolCall("add", {"a": 1, "b": 2})
    result = {"role": "tool", "name": "add", "content": "3"}
    for spaces in (None, (",", ":")):
        text = f"<tool_call>\n{json.dumps({'name': 'add', 'arguments': call.arguments}, separators=spaces)}\n</tool_call>"
        context = bridge.start([ASKS]) + sampled(tokenizer, text)
        new, is_new = bridge.next_tokens([ASKS, said(text, "", (call,)), result], context)
        assert not is_new
        assert new == Bridge(tokenizer, {}, SCHEMAS).following([result], [call])
