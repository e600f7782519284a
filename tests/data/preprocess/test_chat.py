from __future__ import annotations

import json

import pytest
from helpers.rows import write_rows

from lockstep.data.preprocess.chat import RECIPE, convert
from lockstep.data.preprocess.recipe import UnusableRow
from lockstep.data.supervised import SupervisedDataset

USER, ASSISTANT = {"role": "user", "content": "how many?"}, {"role": "assistant", "content": "48"}


def plain(messages):
    return [{name: field for name, field in message.items() if field is not None} for message in messages]


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [USER, ASSISTANT]},
        {"conversations": [{"from": "human", "value": "how many?"}, {"from": "gpt", "value": "48"}]},
        {"conversations": [{"role": "user", "content": "how many?"}, {"role": "assistant", "content": "48"}]},
    ],
)
def test_every_spelling_becomes_messages_that_supervised_training_reads(run, tmp_path, qwen_like, row):
    files = run("chat", write_rows(tmp_path / "d/train.jsonl", [row]))
    (written,) = files["train.parquet"]
    assert plain(written["messages"]) == [USER, ASSISTANT]
    assert (written["ability"], "prompt" in written) == ("chat", False)
    data = SupervisedDataset(tmp_path / "out/train.parquet", qwen_like, max_length=100).batch([0])
    assert qwen_like.decode(data.ragged("responses")[0]) == "48<|im_end|>"


def test_calls_tools_flags_and_the_system_are_kept():
    call = {"id": None, "function": {"name": "f", "arguments": {"a": 1, "filled_by_arrow": None}}}
    row = {
        "system": "Be brief.",
        "tools": [{"name": "f", "other": None}],
        "messages": [
            USER,
            {"role": "assistant", "content": None, "tool_calls": [call], "train": False},
            {"from": "observation", "value": "48"},
            {"from": "function_call", "value": '{"name": "g", "arguments": {}}'},
            ASSISTANT | {"reasoning_content": "hm", "train": True},
        ],
    }
    example = convert(row, "")
    messages = plain(example.columns["messages"])
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "tool", "assistant", "assistant"]
    assert json.loads(messages[2]["tool_calls"]) == [{"function": {"name": "f", "arguments": {"a": 1}}}]
    assert json.loads(messages[4]["tool_calls"]) == [{"name": "g", "arguments": {}}]
    assert messages[5] == ASSISTANT | {"reasoning_content": "hm", "train": True}
    assert [message.get("train") for message in messages] == [None, None, False, None, None, True]
    assert json.loads(example.columns["tools"]) == [{"name": "f"}]
    assert set(example.columns["messages"][0]) | set(messages[5]) <= {field.name for field in RECIPE.columns["messages"].value_type}


@pytest.mark.parametrize(
    ("turns", "reason"),
    [
        (None, "no column 'messages' or 'conversations'"),
        ([USER], "the assistant says nothing"),
        ([ASSISTANT, USER], "the conversation begins with the assistant"),
        ([USER, {"role": "narrator", "content": "x"}], "unknown role: 'narrator'"),
        ([USER, ASSISTANT | {"content": " "}], "a turn is empty"),
        ([USER, {"from": "function_call", "value": "f("}], "not JSON"),
        (["hi"], "a turn is not an object"),
    ],
)
def test_conversations_that_cannot_be_trained_say_why(turns, reason):
    with pytest.raises(UnusableRow, match=reason):
        convert({"messages": turns}, "")


def test_weights_are_kept_and_odd_ones_refused():
    example = convert({"messages": [USER, ASSISTANT | {"weight": 0}]}, "")
    assert example.columns["messages"][1]["weight"] == 0
    with pytest.raises(UnusableRow):
        convert({"messages": [USER, ASSISTANT | {"weight": 0.5}]}, "")
