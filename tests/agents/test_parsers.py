"""Every form: well-formed calls are read, malformed ones are faults, prose is content. Nothing is evaluated, nothing raises."""

import random
import time

import pytest
from helpers.tool_calls import ARGUMENTS, SCHEMAS, WRITE, mutated
from hypothesis import given
from hypothesis import strategies as st

from lockstep.agents.environment import Fault, ToolCall
from lockstep.agents.parsers import PARSERS, as_json, detect_parser
from lockstep.errors import ConfigError


@pytest.mark.parametrize("name", PARSERS)
def test_calls_are_read_as_they_were_meant(name):
    calls = [("f", ARGUMENTS), ("g", {})]
    for count in (1, 2):
        parsed = PARSERS[name].parse(WRITE[name](calls[:count]), SCHEMAS)
        assert parsed.calls == tuple(ToolCall(n, a) for n, a in calls[:count])
        assert parsed.faults == ()
        assert parsed.content == ""


@pytest.mark.parametrize("name", PARSERS)
def test_prose_is_content(name):
    text = "The answer is 4: f(a=3) is {not} a call, [1, 2] neither."
    said = f"<|channel|>analysis<|message|>f to=functions.f?<|end|><|start|>assistant<|channel|>final<|message|>{text}"
    parsed = PARSERS[name].parse(said if name == "harmony" else text, SCHEMAS)
    assert (parsed.content, parsed.calls, parsed.faults) == (text, (), ())


MALFORMED = [
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 3}</tool_call>'),  # the last brace
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 3}}'),
    ("hermes", '<tool_call>{"name": "f", "parameters": {"a": 3}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": "a=3"}</tool_call>'),
    ("hermes", '<tool_call>["f"]</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>'),
    ("llama_json", '{"name": "f", "parameters": {"a": NaN}}'),
    ("llama_json", 'See: {"name": "f", "parameters": {"a": Infinity}}'),
    ("qwen_xml", "<tool_call><function=f><parameter=a>NaN</parameter></function></tool_call>"),
    ("hermes", "<tool_call>" + "[" * 100000 + "</tool_call>"),
    ("qwen_xml", "<tool_call><function=f><parameter=a>three</parameter></function></tool_call>"),
    ("qwen_xml", "<tool_call><function=f><parameter=a>3</function></tool_call>"),
    ("qwen_xml", "<tool_call><function=f></function>"),
    ("qwen_xml", "<tool_call><function=f><parameter=s>x</param\n<parameter=a>3</parameter></function></tool_call>"),
    ("qwen_xml", "<function=f><parameter=a>3</parameter>"),
    ("llama_json", '<|python_tag|>print("hi")'),
    ("llama_json", '{"name": "f", "parameters": {"a": 3}'),
    ("llama_json", '{"name": "f", "parameters": [3]}'),
    ("llama_json", "<|python_tag|>"),
    ("pythonic", "[f(3)]"),
    ("pythonic", "[f(a=__import__('os').getpid())]"),
    ("pythonic", "[f(a=1), g(]"),
    ("pythonic", "[f(**{})]"),
    ("pythonic", "[f(a=" + "(" * 10000 + "]"),
    ("mistral", '[TOOL_CALLS] {"name": "f"'),
    ("mistral", "[TOOL_CALLS] []"),
    ("mistral", "[TOOL_CALLS]f[ARGS]three"),
    ("harmony", "<|channel|>commentary to=functions.f<|message|>three<|call|>"),
    ("harmony", "<|channel|>commentary to=functions.f<|message|>[3]<|call|>"),
    ("harmony", '<|channel|>commentary to=functions.f{"a": 3}<|call|>'),
]


@pytest.mark.parametrize(("name", "text"), MALFORMED, ids=range(len(MALFORMED)))
def test_what_was_meant_as_a_call_and_is_none_is_said(name, text):
    parsed = PARSERS[name].parse(text, SCHEMAS)
    assert parsed.calls == ()
    (fault,) = parsed.faults
    assert "must be" in fault.text
    assert len(fault.text) < 700


NOT_JSON = [
    ("pythonic", "[f(a={1, 2})]"),
    ("pythonic", "[f(a=b'x')]"),
    ("pythonic", "[f(a={(1, 2): 3})]"),
    ("pythonic", "[f(a=...)]"),
    ("pythonic", "[f(a=1e999)]"),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1e999}}</tool_call>'),
    ("hermes", r'<tool_call>{"name": "f", "arguments": {"a": "\ud800"}}</tool_call>'),
    ("hermes", r'<tool_call>{"name": "\ud800", "arguments": {}}</tool_call>'),
]


@pytest.mark.parametrize(("name", "text"), NOT_JSON, ids=range(len(NOT_JSON)))
def test_a_call_that_json_cannot_hold_is_a_fault(name, text):
    (call,) = PARSERS[name].parse(text, SCHEMAS).calls
    fault = as_json(call)
    assert isinstance(fault, Fault)
    assert "must be JSON" in fault.text


def test_a_fault_is_text_that_can_be_shown():
    (fault,) = PARSERS["hermes"].parse(r'<tool_call>{"name": "f", "\ud800": 1}</tool_call>', SCHEMAS).faults
    assert r"it has no '\ud800'" in fault.text


@given(st.data())
@pytest.mark.parametrize("name", PARSERS)
def test_no_text_makes_a_parser_raise_or_lose_a_call_in_silence(name, data):
    """A well-formed text with some characters taken out or put in: what has no call left and a sign of one has a fault."""
    text = WRITE[name]([("f", ARGUMENTS), ("g", {})])
    text = mutated(text, random.Random(data.draw(st.integers(0, 10**6))))
    parsed = PARSERS[name].parse(text, SCHEMAS)
    assert all(isinstance(call.name, str) and isinstance(call.arguments, dict) for call in parsed.calls)
    if name == "hermes" and "<tool_call>" in text:
        assert len(parsed.calls) + len(parsed.faults) == text.count("<tool_call>")


def test_a_call_within_prose_is_one_and_other_objects_are_not():
    call, other = '{"parameters": {"a": 3}, "name": "f"}', '{"name": "Ann"} and {x} and {"parameters": [1]}'
    parsed = PARSERS["llama_json"].parse(f"Well, {other}. So {call}!", SCHEMAS)
    assert parsed.calls == (ToolCall("f", {"a": 3}),)
    assert parsed.content == f"Well, {other}. So !"
    assert parsed.faults == ()


def test_an_object_in_prose_that_names_a_tool_and_is_no_call_is_said():
    for text in ('Well, {"name": "f", "parameters": {"a": 3}', 'Well, {"name": "f", "params": {}}'):
        parsed = PARSERS["llama_json"].parse(text, SCHEMAS)
        assert (len(parsed.calls), len(parsed.faults)) == (0, 1)


def test_a_function_without_its_outer_tags_is_a_call():
    parsed = PARSERS["qwen_xml"].parse("So:\n<function=f><parameter=a>3</parameter></function></tool_call>", SCHEMAS)
    assert (parsed.calls, parsed.faults) == ((ToolCall("f", {"a": 3}),), ())


def test_an_address_makes_a_message_a_call_in_any_channel():
    text = '<|channel|>analysis to=functions.f<|message|>{"a": 3}<|call|>'
    assert PARSERS["harmony"].parse(text, SCHEMAS).calls == (ToolCall("f", {"a": 3}),)


THOUGHT = "<|channel|>analysis<|message|>f to=functions.f, so {...}<|end|><|start|>assistant"
HARMONY = [  # the forms of the format's own page: text, content, calls
    (THOUGHT + '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a":3}', "", [("f", {"a": 3})]),
    (THOUGHT + '<|channel|>commentary to=functions.f<|constrain|>json<|message|>{"a":3}<|call|>', "", [("f", {"a": 3})]),
    # The recipient in the section of the role: after the generation prompt, or in a later message.
    (' to=functions.f<|channel|>commentary json<|message|>{"a": 3}<|call|>', "", [("f", {"a": 3})]),
    (THOUGHT + ' to=functions.f<|channel|>commentary <|constrain|>json<|message|>{"a": 3}<|call|>', "", [("f", {"a": 3})]),
    # What the user is told before the call.
    (
        THOUGHT
        + "<|channel|>commentary<|message|>**Plan**:\n1. f\n---\na < b<|end|><|start|>assistant<|channel|>commentary to=functions.g"
        "<|message|>{}<|call|>",
        "**Plan**:\n1. f\n---\na < b",
        [("g", {})],
    ),
    (THOUGHT + "<|channel|>final<|message|>2 + 2 = 4.<|return|>", "2 + 2 = 4.", []),
]


@pytest.mark.parametrize(("text", "content", "calls"), HARMONY, ids=range(len(HARMONY)))
def test_the_forms_that_harmony_publishes_are_read(text, content, calls):
    parsed = PARSERS["harmony"].parse(text, SCHEMAS)
    assert (parsed.content, parsed.calls, parsed.faults) == (content, tuple(ToolCall(*call) for call in calls), ())


def test_text_without_a_channel_is_content():
    parsed = PARSERS["harmony"].parse("It is 4, to=you.<|return|>", SCHEMAS)
    assert (parsed.content, parsed.calls, parsed.faults) == ("It is 4, to=you.", (), ())


LONG = ["a", " ", "{", "[", "<", "<tool_call>", "<function=f>", "<|channel|>a", "<|message|>", "[TOOL_CALLS]f", '{"name": "f", ']


@pytest.mark.parametrize("piece", LONG)
@pytest.mark.parametrize("name", PARSERS)
def test_the_time_for_a_long_text_grows_with_its_length(name, piece):
    started = time.monotonic()
    PARSERS[name].parse(piece * (40_000 // len(piece)), SCHEMAS)
    assert time.monotonic() - started < 5, "episodes wait for each other's parser"


def test_code_for_harmonys_own_python_is_told_to_be_no_call():
    """That tool takes a program in the analysis instead of JSON; ours are functions."""
    parsed = PARSERS["harmony"].parse("<|channel|>analysis to=python code<|message|>print(1)<|call|>", SCHEMAS)
    assert parsed.calls == ()
    assert len(parsed.faults) == 1


def test_mistrals_names_may_stand_before_their_arguments():
    for text in ('[TOOL_CALLS]f[ARGS]{"a": 3}[TOOL_CALLS]g{}', '[TOOL_CALLS]f{"a": 3}[TOOL_CALLS]g[CALL_ID]abc[ARGS]{}'):
        parsed = PARSERS["mistral"].parse(text, SCHEMAS)
        assert parsed.calls == (ToolCall("f", {"a": 3}), ToolCall("g", {}))
        assert parsed.faults == ()


def test_the_parser_of_a_template_is_found_by_its_own_marks():
    assert detect_parser("{{ '<tool_call>\\n' }}") == "hermes"
    assert detect_parser("<tool_call>\n<function=") == "qwen_xml"
    assert detect_parser("<|channel|> tool_calls") == "harmony"
    assert detect_parser("[TOOL_CALLS]") == "mistral"
    assert detect_parser("'<|tool_call_start|>' ~ tool_calls") == "pythonic"
    assert detect_parser("role == 'ipython'") == "llama_json"
    assert detect_parser("<|im_start|>") == "hermes"
    with pytest.raises(ConfigError, match=r"agent\.parser"):
        detect_parser("<tool_call>{name}<arg_key>")
