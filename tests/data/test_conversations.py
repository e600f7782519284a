"""Masks of conversations against an oracle by characters, for the forms of public chat templates (tests/data/templates)."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from lockstep.data.conversations import ChatTemplate, choose_messages, read_messages
from lockstep.data.token_rows import SpanTokenizer
from lockstep.errors import DataError

TEMPLATES = Path(__file__).parent / "templates"
CHATML = ("<|im_start|>", "<|im_end|>")


class Form(NamedTuple):
    """What stands around an answer in a template's text, read from the model's card and not from our code."""

    special: tuple[str, ...]
    lead: str = ""
    """Between the generation prompt and the answer."""
    close: str = "<|im_end|>"
    """What the model writes after the answer."""
    last_close: str | None = None
    """After the last answer, where that differs."""
    has_system: bool = True
    strips: bool = False
    """Whether blanks around contents are taken off."""


FORMS = {
    "chatml": Form(CHATML),
    "smollm2": Form(CHATML),
    "llama2": Form(("<s>", "</s>"), " ", " </s>", strips=True),
    "llama3": Form(("<s>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"), close="<|eot_id|>", strips=True),
    "mistral": Form(("<s>", "</s>", "[INST]", "[/INST]"), close="</s>", has_system=False),
    "zephyr": Form(("</s>",), close="</s>"),
    "gemma": Form(("<s>", "</s>", "<start_of_turn>", "<end_of_turn>"), close="<end_of_turn>", has_system=False, strips=True),
    "phi3": Form(("</s>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>"), close="<|end|>", last_close="<|end|>\n</s>"),
    "phi4": Form((*CHATML, "<|im_sep|>")),
    "qwen2_5": Form(CHATML),
    "deepseek_v2": Form(("<s>", "</s>"), " ", "</s>"),
    "command_r": Form(
        ("<s>", "<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>", "<|USER_TOKEN|>", "<|CHATBOT_TOKEN|>", "<|SYSTEM_TOKEN|>"),
        close="<|END_OF_TURN_TOKEN|>",
        strips=True,
    ),
    "olmo": Form(("<s>", "</s>"), close="</s>"),
    "granite": Form(("<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>"), close="<|end_of_text|>"),
    "vicuna": Form(("<s>", "</s>"), " ", "</s>", strips=True),
    "falcon": Form((), " ", "", strips=True),
    "gpt_oss": Form(
        ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>"), "<|channel|>final<|message|>", "<|end|>", "<|return|>"
    ),
    "glm4": Form(("[gMASK]", "<sop>", "<|user|>", "<|assistant|>", "<|system|>"), "\n", "<|user|>", ""),
    "smolvlm": Form(("<|im_start|>", "<end_of_utterance>"), " ", "<end_of_utterance>"),
    "openchat": Form(("<s>", "<|end_of_turn|>"), " ", "<|end_of_turn|>"),
}
"""Forms whose earlier turns do not change when a conversation goes on."""

ANSWERS = ("alpha", "beta\n\nbravo", "gamma 🤗 é", " delta ", "", "epsilon\n<|user|> zeta")
"""Words, lines, characters of several bytes, blanks around, nothing, and something like a template's own marker."""


@pytest.fixture
def tokenizer_of(qwen_like):
    def make(name, special):
        made = copy.deepcopy(qwen_like)
        made.add_special_tokens({"additional_special_tokens": [token for token in special if token not in CHATML]})
        made.bos_token = "<s>" if "<s>" in special else None
        made.eos_token = "</s>" if "</s>" in special else "<|im_end|>"
        made.chat_template = (TEMPLATES / f"{name}.jinja").read_text()
        return made

    return make


def conversation(answers, system=False):
    messages = [{"role": "system", "content": "sigma"}] if system else []
    for number, answer in enumerate(answers):
        messages += [{"role": "user", "content": f"question{number}?"}, {"role": "assistant", "content": answer}]
    return messages


def trained_characters(text, form, answers):
    """Found by hand: each question is unique, and the answer is the next text with the template's words around it."""
    marks, found = np.zeros(len(text), dtype=bool), 0
    for number, answer in enumerate(answers):
        answer = answer.strip() if form.strips else answer
        is_last = number == len(answers) - 1
        close = form.last_close if is_last and form.last_close is not None else form.close
        question = text.index(f"question{number}?", found)
        following = len(text) if is_last else text.index(f"question{number + 1}?", question)
        end = text.rindex(answer + close, question + len(f"question{number}?"), following) + len(answer + close)
        found = end - len(form.lead + answer + close)
        assert text[found:end] == form.lead + answer + close
        marks[found:end] = True
    return marks


def trained_tokens(tokenizer, ids, text, marks):
    """Which tokens have a byte of a marked character: from the vocabulary's own spelling of bytes, without offsets."""
    spelled = {character: byte for byte, character in byte_characters().items()}
    of_byte = np.repeat(marks, [len(character.encode()) for character in text])
    specials, start, found = set(tokenizer.get_added_vocab()), 0, []
    for token in tokenizer.convert_ids_to_tokens(ids):
        size = len(token.encode()) if token in specials else len([spelled[character] for character in token])
        found.append(bool(of_byte[start : start + size].any()))
        start += size
    assert start == len(of_byte)
    return found


def byte_characters():
    """The table of GPT-2: printable bytes stand for themselves, the others for characters from 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}


def mask_of(tokenizer, messages, train_on="assistant", tools=None, **kwargs):
    messages = read_messages(messages)
    marked = ChatTemplate(tokenizer, kwargs).mark(messages, choose_messages(messages, train_on), tools)
    (row,) = SpanTokenizer(tokenizer)([marked])
    return marked, row


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("system", [False, True])
def test_the_mask_is_the_oracles(name, system, tokenizer_of):
    form = FORMS[name]
    tokenizer = tokenizer_of(name, form.special)
    answers = [answer for answer in ANSWERS if answer or form.close]  # nothing before nothing cannot be found
    if "<|user|>" in form.close:
        answers = answers[:-1]  # which has that in it
    if system and not form.has_system:
        with pytest.raises(DataError, match="refuses the messages"):
            mask_of(tokenizer, conversation(answers, system))
        return
    marked, row = mask_of(tokenizer, conversation(answers, system))
    marks = trained_characters(marked.text, form, answers)
    assert row.trained.tolist() == trained_tokens(tokenizer, row.ids, marked.text, marks)
    assert row.ids.tolist() == tokenizer(marked.text, add_special_tokens=False)["input_ids"]

    last, last_row = mask_of(tokenizer, conversation(answers, system), "last")
    only = trained_characters(marked.text, form, answers)
    only[: marked.spans[-1][0]] = False
    assert (last.text, len(last.spans)) == (marked.text, 1)
    assert last_row.trained.tolist() == trained_tokens(tokenizer, row.ids, marked.text, only)


@pytest.mark.parametrize("name", [name for name in FORMS if name != "smolvlm"])  # which takes no plain texts
def test_the_prompt_is_the_one_that_is_generated_from(name, tokenizer_of):
    tokenizer = tokenizer_of(name, FORMS[name].special)
    messages = conversation(["alpha", "beta"])
    marked, _ = mask_of(tokenizer, messages, "last")
    prompt = tokenizer.apply_chat_template(messages[:-1], tokenize=False, add_generation_prompt=True)
    assert marked.text[: marked.spans[0][0]] == prompt


QUESTION = {"role": "user", "content": "why?"}


def trained_texts(marked):
    return [marked.text[start:end] for start, end in marked.spans]


def test_thinking_that_a_template_drops_is_trained_last_or_refused_by_name(tokenizer_of):
    tokenizer = tokenizer_of("qwen3", CHATML)
    tokenizer.name_or_path = "Qwen/Qwen3-0.6B"
    thought = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nso"}
    for one in (thought, {"role": "assistant", "content": "so", "reasoning_content": "hm"}):
        marked, _ = mask_of(tokenizer, [QUESTION, one])
        assert trained_texts(marked) == ["<think>\nhm\n</think>\n\nso<|im_end|>"]
    many = [QUESTION, thought, QUESTION, thought]
    with pytest.raises(DataError, match=r"chat template of Qwen/Qwen3-0.6B .* train_on=last .* generation"):
        mask_of(tokenizer, many)
    marked, _ = mask_of(tokenizer, many, "last")
    assert trained_texts(marked) == ["<think>\nhm\n</think>\n\nso<|im_end|>"]
    assert marked.text.count("hm") == 1


def test_what_the_generation_prompt_supplies_is_not_trained(tokenizer_of):
    tokenizer = tokenizer_of("qwen3", CHATML)
    messages = [QUESTION, {"role": "assistant", "content": "so"}]
    assert trained_texts(mask_of(tokenizer, messages)[0]) == ["<think>\n\n</think>\n\nso<|im_end|>"]
    assert trained_texts(mask_of(tokenizer, messages, enable_thinking=False)[0]) == ["so<|im_end|>"]


def test_a_generation_prompt_that_the_answer_lacks_is_refused(tokenizer_of):
    tokenizer = tokenizer_of("deepseek_r1", ("<s>", "</s>", "<｜User｜>", "<｜Assistant｜>"))  # noqa: RUF001
    with pytest.raises(DataError, match="its generation prompt has a text that the answer lacks"):
        mask_of(tokenizer, [QUESTION, {"role": "assistant", "content": "<think>\nhm\n</think>\n\nso"}], "last")


def test_a_system_message_that_moves_is_trained_last_or_refused(tokenizer_of):
    tokenizer = tokenizer_of("mistral_v3", ("<s>", "</s>", "[INST]", "[/INST]"))
    assert trained_texts(mask_of(tokenizer, conversation(["alpha", "beta"]))[0]) == [" alpha</s>", " beta</s>"]
    with pytest.raises(DataError, match="moves the system message"):
        mask_of(tokenizer, conversation(["alpha", "beta"], system=True))
    assert trained_texts(mask_of(tokenizer, conversation(["alpha", "beta"], system=True), "last")[0]) == [" beta</s>"]


def test_markers_of_the_template_decide_where_its_turns_change(tokenizer_of):
    tokenizer = tokenizer_of("marked", CHATML)
    messages = conversation(["<think>a</think>alpha", "<think>b</think>beta"])
    assert trained_texts(mask_of(tokenizer, messages)[0]) == ["alpha<|im_end|>", "<think>b</think>beta<|im_end|>"]
    messages[1]["train"], messages[3]["train"] = True, False
    assert trained_texts(mask_of(tokenizer, messages, "flag")[0]) == ["alpha<|im_end|>"]
    for inside in (
        "~ '<|im_end|>' ~ '\n' }}",
        "}}",
    ):  # a line end after the end of turn is no part of the answer; the end of turn is
        tokenizer = tokenizer_of("marked", CHATML)
        outside = "" if "im_end" in inside else "{{ '<|im_end|>' }}"
        ends = "~ '<|im_end|>' }}{%- endgeneration -%}"
        tokenizer.chat_template = tokenizer.chat_template.replace(ends, f"{inside}{{% endgeneration -%}}{outside}")
        assert trained_texts(mask_of(tokenizer, conversation(["<think>a</think>alpha", "beta"]))[0]) == [
            "alpha<|im_end|>",
            "beta<|im_end|>",
        ]


def test_tool_calls_are_trained_and_their_results_are_not(tokenizer_of):
    tokenizer = tokenizer_of("qwen2_5", CHATML)
    call = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": "é"}'}}
    messages = [
        QUESTION,
        {"role": "assistant", "content": None, "tool_calls": [call, call], "train": None},
        {"role": "tool", "content": "3", "tool_calls": None},
        {"role": "tool", "content": "4"},
        {"role": "assistant", "content": "it is 3", "tool_calls": None},
    ]
    tools = [{"type": "function", "function": {"name": "add"}}]
    shown = '\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "é"}}\n</tool_call>'
    marked, _ = mask_of(tokenizer, messages, tools=tools)
    assert trained_texts(marked) == [f"{shown * 2}<|im_end|>"[1:], "it is 3<|im_end|>"]  # the line end is the generation prompt's
    messages[1]["content"] = "let me see"
    marked, _ = mask_of(tokenizer, messages, tools=tools)
    assert trained_texts(marked) == [f"let me see{shown * 2}<|im_end|>", "it is 3<|im_end|>"]
    assert '"name": "add"' in marked.text.split("<tools>")[1].split("</tools>")[0]


@pytest.mark.parametrize("name", FORMS)
def test_tools_and_calls_are_in_the_text_or_refused(name, tokenizer_of):
    tokenizer, tools = (
        tokenizer_of(name, FORMS[name].special),
        [{"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}],
    )
    template = ChatTemplate(tokenizer, {})
    call = {"id": "abcdefghi", "type": "function", "function": {"name": "multiply", "arguments": {"a": 1}}}
    called = read_messages([QUESTION, {"role": "assistant", "content": "well", "tool_calls": [call]}])
    for messages, trained, shown, word in (
        (read_messages([QUESTION, {"role": "assistant", "content": "so"}]), [False, True], tools, "look_up"),
        (called, [False, True], None, "multiply"),
        ([*called, QUESTION, {"role": "assistant", "content": "so"}], [False, False, False, True], None, "multiply"),
    ):
        try:
            text = template.mark(messages, trained, shown).text
        except DataError as error:
            refusal = str(error)
            assert any(words in refusal for words in ("leaves the tools out", f"the tool '{word}'", "refuses", "cannot be told")), (
                refusal
            )
        else:
            assert word in text
            assert template.render_all(messages, shown) == text


def test_a_template_that_runs_into_an_error_of_python_refuses_the_row(tokenizer_of):
    tokenizer = tokenizer_of("chatml", CHATML)
    for code in ("{{ 'a'.index('b') }}", "{{ 1 // 0 }}", "{{ {}.popitem() }}", "{{ messages[0].content + 1 }}"):
        tokenizer.chat_template = code
        with pytest.raises(DataError, match="refuses the messages"):
            ChatTemplate(tokenizer, {}).render([QUESTION])


NO_FIRST_ANSWER = {"llama2", "mistral"}


@pytest.mark.parametrize("name", FORMS)
def test_a_first_answer_is_trained_like_any_other_or_refused(name, tokenizer_of):
    """Some conversations begin with one; transformers renders no empty list before it."""
    form = FORMS[name]
    tokenizer = tokenizer_of(name, form.special)
    messages = [{"role": "assistant", "content": "alpha"}, *conversation(["beta"])]
    if name in NO_FIRST_ANSWER:
        with pytest.raises(DataError, match="refuses the messages|does not say where a first message begins"):
            mask_of(tokenizer, messages)
        return
    marked, _ = mask_of(tokenizer, messages)
    assert trained_texts(marked)[0] == form.lead + "alpha" + form.close
    alone = mask_of(tokenizer, messages[:1])[0]
    assert trained_texts(alone) == [form.lead + "alpha" + (form.close if form.last_close is None else form.last_close)]


def test_a_first_message_of_another_role_cannot_be_trained(tokenizer_of):
    messages = [conversation(["alpha"])[0] | {"train": True}, {"role": "assistant", "content": "alpha", "train": False}]
    with pytest.raises(DataError, match="does not say where a first message begins, so what a message became cannot be told"):
        mask_of(tokenizer_of("chatml", CHATML), messages, "flag")


def test_flags_choose_messages_of_any_role(tokenizer_of):
    for name in ("chatml", "phi3"):
        tokenizer = tokenizer_of(name, FORMS[name].special)
        messages = conversation(["alpha", "beta"])
        messages[1]["train"], messages[2]["train"], messages[3]["train"] = False, True, True
        first, second = trained_texts(mask_of(tokenizer, messages, "flag")[0])
        assert "question1?" in first
        assert not any(word in first for word in ("assistant", "alpha", "beta"))
        assert second.startswith("beta")
    del messages[1]["train"]
    with pytest.raises(DataError, match="train_on"):
        mask_of(tokenizer, messages, "flag")


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "expected a list of messages"),
        ("hi", "expected a list of messages"),
        ([{"content": "x"}], "dict with role and content"),
        ([{"role": "user", "content": None}], "must be text or a list of parts"),
        ([{"role": "assistant", "content": "", "tool_calls": "[{"}], "tool_calls is not JSON"),
        ([{"role": "assistant", "content": "", "tool_calls": 5}], "tool_calls must be a list"),
        ([{"role": "assistant", "content": "", "tool_calls": [{"function": {}}]}], "a function with a name"),
        ([{"role": "assistant", "content": "", "tool_calls": [{"name": "f", "arguments": "x"}]}], "arguments is not JSON"),
    ],
)
def test_messages_that_are_none_are_refused(messages, words):
    with pytest.raises(DataError, match=words):
        read_messages(messages)


def test_half_a_character_is_refused(tokenizer_of):
    with pytest.raises(DataError, match="not valid Unicode"):
        mask_of(tokenizer_of("chatml", CHATML), conversation(["\ud83d"]))


@pytest.mark.parametrize("name", ["reasoning_content", "content"])
def test_thinking_that_is_not_in_the_text_of_its_message_is_refused(name, tokenizer_of):
    message = {"role": "assistant", "content": "so", "reasoning_content": "hm"}
    if name == "content":
        message = {"role": "assistant", "content": "<think>hm</think>so"}
    shown = tokenizer_of("chatml", CHATML)
    if name == "content":
        assert trained_texts(mask_of(shown, [QUESTION, message])[0]) == ["<think>hm</think>so<|im_end|>"]
        shown.chat_template = shown.chat_template.replace("m.content", "m.content.split('</think>')[-1]")
    with pytest.raises(DataError, match="drops the thinking of a trained message"):
        mask_of(shown, [QUESTION, message])


def test_a_template_that_takes_arguments_as_text_only_gets_text(tokenizer_of):
    tokenizer = tokenizer_of("chatml", CHATML)
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
        "{% for call in m.tool_calls or [] %}{{ call.function.name + call.function.arguments }}{% endfor %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    for arguments, shown in (({"a": "é"}, '{"a": "é"}'), ('{"a": "é"}', '{"a": "é"}'), ("", "{}"), (None, "{}")):
        call = {"function": {"name": "f", "arguments": arguments}}
        marked, _ = mask_of(tokenizer, [QUESTION, {"role": "assistant", "content": "", "tool_calls": [call]}])
        assert trained_texts(marked) == [f"f{shown}<|im_end|>"]


def test_a_template_that_cannot_do_without_tools_is_given_them(tokenizer_of):
    tokenizer = tokenizer_of("chatml", CHATML)
    tokenizer.chat_template = "{% for tool in tools %}{{ tool.name }};{% endfor %}" + tokenizer.chat_template
    answer = {"role": "assistant", "content": "so"}
    assert mask_of(tokenizer, [QUESTION, answer], tools=[{"name": "look_up"}])[0].text.startswith("look_up;")


ASSISTANT, USER = {"role": "assistant", "content": "a"}, {"role": "user", "content": "q"}


@pytest.mark.parametrize("mark", [{"train": False}, {"weight": 0}, {"weight": 0.0}, {"weight": 0, "train": False}])
def test_a_message_that_is_not_to_be_trained_is_not(mark):
    messages = [USER, ASSISTANT, USER, ASSISTANT | mark, USER, ASSISTANT | {"weight": 1}]
    assert choose_messages(messages, "assistant") == [False, True, False, False, False, True]
    assert choose_messages(messages[:4], "last") == [False] * 4
    assert choose_messages([USER, ASSISTANT | {"train": True}, *messages[2:]], "flag") == [False, True, False, False, False, True]
    with pytest.raises(DataError, match="train_on"):
        choose_messages(messages, "all")
    assert choose_messages(messages[4:], "all") == [True, True]


@pytest.mark.parametrize("mode", ["assistant", "last", "flag", "all"])
@pytest.mark.parametrize(
    "mark",
    [
        {"weight": 0.5},
        {"weight": 2},
        {"weight": "0"},
        {"weight": True},
        {"train": "no"},
        {"train": 0},
        {"train": True, "weight": 0},
    ],
)
def test_another_mark_is_refused_and_never_ignored(mark, mode):
    with pytest.raises(DataError, match="train|weight"):
        choose_messages([USER, ASSISTANT | mark], mode)


def test_a_message_of_another_role_is_trained_by_flags_only():
    messages = [USER | {"train": True}, ASSISTANT | {"train": True}]
    assert choose_messages(messages, "flag") == [True, True]
    for mode in ("assistant", "last"):
        with pytest.raises(DataError, match="train_on"):
            choose_messages(messages, mode)
