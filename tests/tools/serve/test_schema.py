"""Bodies that are no requests: whatever a client sends, the answer is BadRequest with the name of the field."""

from __future__ import annotations

import json
from contextlib import suppress
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from lockstep.tools.serve import schema
from lockstep.tools.serve.schema import BadRequest

CHAT = {"messages": [{"role": "user", "content": "a"}]}


def read(model, body):
    """The request in a body, as the routes read it. Raises BadRequest."""
    try:
        return model.model_validate(schema.parse_json(body))
    except json.JSONDecodeError as error:
        raise schema.invalid_body([{"type": "json_invalid", "loc": ("body", 0), "ctx": {"error": error.msg}}]) from error
    except ValidationError as error:
        raise schema.invalid_body([one | {"loc": ("body", *one["loc"])} for one in error.errors()]) from error


read_completion = partial(read, schema.CompletionRequest)
read_chat = partial(read, schema.ChatRequest)
read_tokenize = partial(read, schema.TokenizeRequest)


def refused(read, body):
    with pytest.raises(BadRequest) as caught:
        read(body if isinstance(body, bytes) else json.dumps(body).encode())
    return caught.value


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe",
        b'{"prompt": "\\ud800"}',
        b"[" * 100_000,
        b'{"prompt": "a", "seed": 1' + b"0" * 5000 + b"}",
    ],
)
def test_a_body_that_is_no_json_object_is_refused(body):
    assert refused(read_completion, body).code in ("invalid_json", None)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("prompt", []), ("prompt", [[]]), ("prompt", ["a", 3]), ("prompt", [True]), ("prompt", {}), ("prompt", [["a"]]),
        ("temperature", -1), ("temperature", "0"), ("temperature", True), ("temperature", float("nan")), ("top_p", 0), ("top_p", 1.5),
        ("max_tokens", -1), ("max_tokens", 0), ("max_tokens", 1.5), ("n", 0), ("n", 129), ("logprobs", 21), ("logprobs", True),
        ("stop", ""), ("stop", ["a"] * 65), ("stop", [1]), ("stop_token_ids", ["a"]), ("echo", 1), ("stream", "yes"), ("seed", 2**64),
        ("best_of", 3), ("suffix", "b"), ("logit_bias", {"1": 2}), ("stream_options", {"include_usage": True}), ("temprature", 1.0),
        ("model", 3), ("min_p", 2), ("temperature", 1e-300), ("temperature", 1e-38), ("max_tokens", 10**4000), ("presence_penalty", 3),
    ],
)  # fmt: skip
def test_the_field_that_is_wrong_is_named(field, value):
    error = refused(read_completion, {"prompt": "a"} | {field: value})
    assert error.status == 400
    assert error.param == field
    assert len(str(error)) < 300


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("messages", []), ("messages", "a"), ("messages", CHAT["messages"] * (1 << 15)),
        ("tools", {}), ("tool_choice", "required"), ("response_format", {"type": "json_object"}),
        ("top_logprobs", 3), ("max_completion_tokens", 0), ("chat_template_kwargs", {"chat_template": "x"}), ("functions", [{}]),
        ("parallel_tool_calls", False),
    ],
)  # fmt: skip
def test_the_field_of_a_chat_that_is_wrong_is_named(field, value):
    assert refused(read_chat, CHAT | {field: value}).param == field


def test_the_message_that_is_wrong_is_named():
    for wrong in (
        {"role": 1, "content": "a"},
        "a",
        {"role": "user", "content": [{"type": "image_url"}]},
        {"role": "user", "content": 1},
    ):
        assert refused(read_chat, {"messages": [*CHAT["messages"], wrong]}).param == "messages[1]"


def test_what_says_nothing_about_the_answer_is_taken():
    neutral = {"user": "me", "logit_bias": {}, "best_of": 1, "suffix": None, "store": True, "whatever": None, "logprobs": None}
    plain = read_completion(b'{"prompt": "a"}').model_dump()
    assert read_completion(json.dumps({"prompt": "a"} | neutral).encode()).model_dump() == plain | {"best_of": 1}
    parts = {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}], "response_format": {"type": "text"}}
    assert read_chat(json.dumps(parts).encode()).messages == read_chat(json.dumps(CHAT).encode()).messages


def test_the_forms_of_a_prompt():
    forms = (("a", ["a"]), ([1, 2], [[1, 2]]), (["a", "b"], ["a", "b"]), ([[1], [2, 3]], [[1], [2, 3]]), (["a", [1]], ["a", [1]]))
    for given_form, expected in forms:
        assert read_completion(json.dumps({"prompt": given_form}).encode()).prompt == expected


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
FIELDS = [
    "prompt", "messages", "model", "temperature", "top_p", "top_k", "min_p", "max_tokens", "max_completion_tokens", "n", "stop", "seed",
    "stop_token_ids", "logprobs", "top_logprobs", "echo", "stream", "stream_options", "tools", "tool_choice", "chat_template_kwargs",
    "response_format", "logit_bias", "best_of", "suffix", "presence_penalty", "ignore_eos", "add_generation_prompt", "parallel_tool_calls",
]  # fmt: skip


@settings(max_examples=60)
@given(
    st.dictionaries(st.sampled_from(FIELDS), json_values, max_size=4), st.sampled_from([read_completion, read_chat, read_tokenize])
)
def test_any_json_is_a_call_or_a_bad_request(body, read):
    valid = {"prompt": "a"} if read is read_completion else CHAT
    for sent in (body, valid | body):
        with suppress(BadRequest):
            read(json.dumps(sent).encode())


def test_a_body_full_of_mistakes_has_one_error_for_each_field():
    """Millions of them would fill the memory."""
    body = {"messages": [{}] * 10000, "stop": [1] * 10000, "stop_token_ids": ["a"] * 10000, "tools": [1] * 10000}
    with pytest.raises(ValidationError) as caught:
        schema.ChatRequest.model_validate(body | {"n": 0})
    assert caught.value.error_count() == 5
