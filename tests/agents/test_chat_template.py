"""The tokens between turns, for the forms of public chat templates (tests/data/templates)."""

from __future__ import annotations

import json

import pytest
from helpers.chat_templates import SCHEMAS, TEMPLATES, tokenizer_of

from lockstep.agents.chat_template import ConversationTemplate, TurnTemplate
from lockstep.agents.environment import Action, ToolCall
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
            TurnTemplate(tokenizer, {})
        return
    template = TurnTemplate(tokenizer, {})
    messages = [{"role": "user", "content": "one  two"}]
    ids = template.start(messages)
    for answer, question in (("alpha", "beta\n"), ("gamma", " delta"), ("epsilon", "zeta")):
        new = [{"role": "user", "content": question}]
        ids += tokenizer.encode(answer, add_special_tokens=False)
        ids += [template.end_of_turn(), *template.following(new)]
        messages += [{"role": "assistant", "content": answer}, *new]
        whole = ChatTemplate(tokenizer, {}).render(messages, add_generation_prompt=True)
        assert whole.endswith(tokenizer.decode(template.following(new)))
        if name in ("chatml", "smollm2", "qwen2_5", "llama3", "zephyr", "phi4", "granite", "gemma", "mistral", "command_r"):
            assert tokenizer.decode(ids) == whole


def test_results_of_tools_have_the_templates_own_form_or_the_users():
    qwen = tokenizer_of("qwen2_5")
    template = TurnTemplate(qwen, {}, SCHEMAS)
    results = [{"role": "tool", "name": "add", "content": "3"}, {"role": "tool", "name": "add", "content": "4"}]
    call = ToolCall("add", {"a": 1, "b": 2})
    calls = [{"id": "0", "type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}] * 2
    asks = [{"role": "user", "content": "?"}]
    messages = [*asks, {"role": "assistant", "content": "", "tool_calls": calls}, *results]
    whole = qwen.apply_chat_template(messages, tools=SCHEMAS, tokenize=False, add_generation_prompt=True)
    assert template.has_tools
    assert template.has_several_calls
    assert whole.endswith("</tool_call><|im_end|>" + qwen.decode(template.following(results, [call, call])))

    smol = tokenizer_of("smollm2")
    template = TurnTemplate(smol, {}, SCHEMAS)
    assert not template.has_tools
    first = smol.decode(template.start(asks))
    assert '"name": "add"' in first
    assert "<tool_call>" in first
    text = smol.decode(template.following(results, [call, call]))
    assert text == (
        "\n<|im_start|>user\n<tool_response>\n3\n</tool_response>\n<tool_response>\n4\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_tokenizer_without_a_template_is_refused():
    tokenizer = tokenizer_of("chatml")
    tokenizer.chat_template = None
    with pytest.raises(ConfigError, match="chat template"):
        TurnTemplate(tokenizer, {})


# -- Conversations that are rendered again before each turn ----------------------------------------------------------------

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
    template = ConversationTemplate(tokenizer, {})
    chat_template = ChatTemplate(tokenizer, {})
    end = tokenizer.convert_ids_to_tokens(min(template.end_ids)) if template.end_ids else "</s>"
    conversation, messages = [ASKS], [ASKS]
    context = template.start([ASKS])
    for answer in ("alpha", "gamma"):
        context = context + sampled(tokenizer, answer, end)
        conversation += [said(answer), MORE]
        messages = [*messages, {"role": "assistant", "content": template._begun + answer}, MORE]
        new, is_new = template.next_tokens(conversation, context)
        context = new if is_new else context + new
        assert tokenizer.decode(context) == chat_template.render(messages, add_generation_prompt=True)


def test_a_prefix_that_stays_is_gone_on_from_with_the_tokens_that_were_sampled():
    tokenizer = tokenizer_of("chatml")
    tokenizer.add_tokens(["alpha"])  # the tokenizer would write one token where the policy wrote five
    template = ConversationTemplate(tokenizer, {})
    context = template.start([ASKS]) + sampled(tokenizer, "alpha")
    new, is_new = template.next_tokens([ASKS, said("alpha"), MORE], context)
    assert (new, is_new) == (TurnTemplate(tokenizer, {}).following([MORE]), False)
    cut = template.start([ASKS]) + sampled(tokenizer, "alpha", end=None)
    new, is_new = template.next_tokens([ASKS, said("alpha", is_cut=True), MORE], cut)
    assert not is_new
    assert tokenizer.decode(new).startswith("<|im_end|>\n<|im_start|>user\nand?")


def test_thinking_that_is_dropped_breaks_the_prefix_once_a_question_follows_and_not_before():
    """The form of Qwen3: an answer keeps its thinking until the next question; results of tools are none."""
    tokenizer = tokenizer_of("qwen3")
    template = ConversationTemplate(tokenizer, {})
    context = template.start([ASKS]) + sampled(tokenizer, THINKS)
    new, is_new = template.next_tokens([ASKS, said(THINKS), MORE], context)
    assert is_new
    assert "Hm." not in tokenizer.decode(new)
    assert "alpha<|im_end|>" in tokenizer.decode(new)
    new, is_new = template.next_tokens([ASKS, said(THINKS), {"role": "system", "content": "go on"}], context)
    assert not is_new
    # What the generation prompt supplies goes too.
    without = ConversationTemplate(tokenizer, {"enable_thinking": False})
    context = without.start([ASKS]) + sampled(tokenizer, "alpha")
    assert without.next_tokens([ASKS, said("alpha"), MORE], context)[1]


def test_thinking_that_the_generation_prompt_has_begun_belongs_to_the_answer():
    tokenizer = tokenizer_of("chatml")
    tokenizer.chat_template = tokenizer.chat_template.replace("assistant\\n'", "assistant\\n<think>\\n'")
    template = ConversationTemplate(tokenizer, {})
    context = template.start([ASKS])
    assert tokenizer.decode(context).endswith("<think>\n")
    context += sampled(tokenizer, "Hm.\n</think>\n\nalpha")
    new, is_new = template.next_tokens([ASKS, said("Hm.\n</think>\n\nalpha"), MORE], context)
    assert not is_new
    assert tokenizer.decode(new) == "\n<|im_start|>user\nand?<|im_end|>\n<|im_start|>assistant\n<think>\n"


def test_a_template_that_moves_messages_breaks_every_prefix():
    """Mistral's shows the system message before the last question only."""
    tokenizer = tokenizer_of("mistral_v3")
    template = ConversationTemplate(tokenizer, {})
    system = {"role": "system", "content": "Be brief."}
    context = template.start([system, ASKS]) + sampled(tokenizer, "alpha", "</s>")
    new, is_new = template.next_tokens([system, ASKS, said("alpha"), MORE], context)
    assert is_new
    assert tokenizer.decode(new).index("alpha") < tokenizer.decode(new).index("Be brief.")


def test_calls_are_shown_as_they_were_written_where_that_is_the_templates_form_too():
    tokenizer = tokenizer_of("qwen2_5")
    template = ConversationTemplate(tokenizer, {}, SCHEMAS)
    call = ToolCall("add", {"a": 1, "b": 2})
    result = {"role": "tool", "name": "add", "content": "3"}
    for spaces in (None, (",", ":")):
        text = f"<tool_call>\n{json.dumps({'name': 'add', 'arguments': call.arguments}, separators=spaces)}\n</tool_call>"
        context = template.start([ASKS]) + sampled(tokenizer, text)
        new, is_new = template.next_tokens([ASKS, said(text, "", (call,)), result], context)
        assert not is_new
        assert new == TurnTemplate(tokenizer, {}, SCHEMAS).following([result], [call])
