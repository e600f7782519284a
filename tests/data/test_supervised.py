from __future__ import annotations

import copy
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from helpers.errors import raises
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from lockstep.data.conversations import MarkedText
from lockstep.data.supervised import SupervisedDataset
from lockstep.data.token_rows import SpanTokenizer
from lockstep.errors import ConfigError, DataError

MESSAGES = [
    {"role": "user", "content": "how many?"},
    {"role": "assistant", "content": "48 in May 🤗"},
    {"role": "user", "content": "and now?"},
    {"role": "assistant", "content": "1,234"},
]


@pytest.fixture
def open_rows(tmp_path, qwen_like):
    def make(rows, name="rows.jsonl", tokenizer=qwen_like, **options):
        path = tmp_path / name
        if path.suffix == ".parquet":
            names = dict.fromkeys(name for row in rows for name in row)
            pq.write_table(pa.Table.from_pylist([dict.fromkeys(names) | row for row in rows]), path)
        else:
            path.write_text("\n".join(map(json.dumps, rows)))
        return SupervisedDataset(path, tokenizer, **{"max_length": 1000} | options)

    return make


def parts(data, tokenizer):
    """Of each row the prompt, and the response with what is not trained left out."""
    columns = (data.ragged(name).rows() for name in ("prompts", "responses", "response_mask"))
    return [(tokenizer.decode(p), tokenizer.decode(r[m.bool()])) for p, r, m in zip(*columns, strict=True)]


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet"])
def test_every_form_becomes_prompts_responses_and_a_mask(open_rows, qwen_like, name):
    rows = [
        {"messages": MESSAGES},
        {"prompt": "how many?", "completion": "48"},
        {"prompt": MESSAGES[:3], "completion": MESSAGES[3:]},
        {"prompt": MESSAGES[:1], "response": "48"},
        {"text": "48 clips"},
    ]
    if name == "rows.parquet":
        rows = [{"messages": MESSAGES}, {"prompt": None, "text": "48 clips"}, {"prompt": "how many?", "response": "48"}]
    dataset = open_rows(rows, name)
    data = dataset.batch(range(len(rows)))
    found = parts(data, qwen_like)
    assert found[0] == (
        "<|im_start|>system\nBe helpful.<|im_end|>\n<|im_start|>user\nhow many?<|im_end|>\n<|im_start|>assistant\n",
        "48 in May 🤗<|im_end|>1,234<|im_end|>",
    )
    trained = [answer for _, answer in found]
    if name == "rows.jsonl":
        assert trained[1:] == ["48<|im_end|>", "1,234<|im_end|>", "48<|im_end|>", "8 clips<|im_end|>"]
        assert data.non_tensor_batch["num_bytes"].tolist() == [19, 2, 5, 2, 7]
    else:
        assert trained[1:] == ["8 clips<|im_end|>", "48<|im_end|>"]
    assert data.non_tensor_batch["index"].tolist() == list(range(len(rows)))
    for row in range(len(rows)):
        mask = data.ragged("response_mask")[row]
        assert mask[0] == mask[-1] == 1
        assert len(data.ragged("prompts")[row]) >= 1
    assert {data.ragged(column).values.dtype for column in data.columns} == {torch.int64}


def test_what_is_trained_can_be_chosen(open_rows, qwen_like):
    flagged = [dict(message, train=i == 1) for i, message in enumerate(MESSAGES)]
    for train_on, rows, expected in [
        ("last", MESSAGES, "1,234<|im_end|>"),
        ("assistant", MESSAGES, "48 in May 🤗<|im_end|>1,234<|im_end|>"),
        ("flag", flagged, "48 in May 🤗<|im_end|>"),
    ]:
        ((_, answer),) = parts(open_rows([{"messages": rows}], train_on=train_on).batch([0]), qwen_like)
        assert answer == expected
    data = open_rows([{"messages": MESSAGES}], train_on="all").batch([0])
    assert len(data.ragged("prompts")[0]) == 1
    assert data.ragged("response_mask").values.all()
    assert data.token_counts()[0] == len(qwen_like.apply_chat_template(MESSAGES, tokenize=True)["input_ids"])
    with raises(ConfigError, "data.train_on"):
        open_rows([{"text": "x"}], train_on="user")
    with pytest.raises(DataError, match="train_on=flag needs messages"):
        open_rows([{"text": "hello there"}], train_on="flag")


def test_plain_strings_are_cut_at_the_token_that_has_the_completion_in_it(open_rows, qwen_like):
    dataset = open_rows([{"prompt": "She sold 48 ", "completion": "clips"}], use_template=False)
    ((prompt, answer),) = parts(dataset.batch([0]), qwen_like)
    assert prompt + answer == "She sold 48 clips<|im_end|>"
    assert answer == " clips<|im_end|>"  # the blank and the word are one token
    whole = torch.cat([dataset.batch([0]).ragged(name).values for name in ("prompts", "responses")]).tolist()
    assert whole == [*qwen_like("She sold 48 clips")["input_ids"], qwen_like.eos_token_id]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_every_character_of_a_span_is_trained_whatever_the_text(qwen_like, data):
    text = data.draw(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=30))
    start = data.draw(st.integers(0, len(text) - 1))
    end = data.draw(st.integers(start + 1, len(text)))
    (row,) = SpanTokenizer(qwen_like)([MarkedText(text, ((start, end),), True)])
    covered = {i for s, e, t in zip(row.starts, row.ends, row.trained, strict=True) if t for i in range(s, e)}
    assert set(range(start, end)) <= covered
    untrained = {i for s, e, t in zip(row.starts, row.ends, row.trained, strict=True) if not t for i in range(s, e)}
    assert not untrained & set(range(start, end))


def test_blanks_that_offsets_leave_out_belong_to_their_token(open_rows):
    """As RoBERTa's: offsets without blanks."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.post_processor = processors.ByteLevel(trim_offsets=True)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(["a b"], trainers.BpeTrainer(vocab_size=260, initial_alphabet=alphabet, show_progress=False))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")
    rows = SpanTokenizer(tokenizer)([MarkedText("ab  cd", span, True) for span in (((2, 4),), ((0, 2),), ((4, 6),))])
    assert [row.trained.astype(int).tolist() for row in rows] == [[0, 0, 1, 1, 0, 0], [1, 1, 0, 0, 0, 0], [0, 0, 0, 0, 1, 1]]


def test_a_begin_token_is_there_once_and_an_end_token_once(open_rows, qwen_like):
    tokenizer = copy.deepcopy(qwen_like)
    tokenizer.bos_token = "<|im_start|>"
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", tokenizer.bos_token_id)]
    )
    texts = ["48 clips", "<|im_start|>48 clips", "48 clips<|im_end|>"]
    data = open_rows([{"text": text} for text in texts], tokenizer=tokenizer).batch([0, 1, 2])
    assert parts(data, tokenizer) == [("<|im_start|>", "48 clips<|im_end|>")] * 3


@pytest.mark.parametrize(
    ("truncation", "expected"),
    [("left", [4, 5, 6, 7, 8]), ("right", [0, 1, 2, 3, 4]), ("middle", [0, 1, 6, 7, 8])],
)
def test_a_row_that_is_too_long_is_cut_as_asked(open_rows, plain_tokenizer, truncation, expected):
    words = [f"w{i}" for i in range(8)]
    row = {"prompt": "w0 w1 w2", "completion": " w3 w4 w5 w6 w7"}
    data = open_rows([row], tokenizer=plain_tokenizer, max_length=5, truncation=truncation).batch([0])
    ids = [*plain_tokenizer.convert_tokens_to_ids(words), plain_tokenizer.eos_token_id]
    assert torch.cat([data.ragged("prompts").values, data.ragged("responses").values]).tolist() == [ids[i] for i in expected]
    trained = [i >= 3 for i in expected]
    kept = data.ragged("response_mask").values.tolist()
    assert sum(kept) == sum(trained[1:])


def test_bad_rows_are_named_with_file_and_number_before_training(open_rows, plain_tokenizer, tmp_path):
    good = {"prompt": "w1", "completion": "w2"}
    long = {"prompt": "w1", "completion": " w2" * 30}
    with raises(DataError, "data.max_length") as error:
        open_rows([good] * 70 + [long] + [good] * 70, tokenizer=plain_tokenizer, max_length=20)
    assert "rows.jsonl row 70, which needs 32 tokens" in str(error.value)
    # More text, but fewer tokens: of the rows that are too long the error has the longest.
    other = {"prompt": "w1", "completion": " w2" * 25 + " " + "x" * 50}
    with raises(DataError, "data.max_length") as error:
        open_rows([other, long, good], tokenizer=plain_tokenizer, max_length=20)
    assert str(error.value).startswith("2 rows")
    assert "rows.jsonl row 1, which needs 32 tokens" in str(error.value)
    with raises(DataError, "data.max_length") as error:
        open_rows([{"prompt": "w1 w2 w3 w4 ", "completion": "w5"}], tokenizer=plain_tokenizer, max_length=3, truncation="right")
    assert "data.truncation=right" in str(error.value)
    assert "rows.jsonl row 0, which needs 6 tokens" in str(error.value)
    with pytest.raises(DataError, match=r"row 1: expected messages; prompt and completion"):
        open_rows([good, {"prompt": "w1", "answer": "w2"}], tokenizer=plain_tokenizer)
    with pytest.raises(DataError, match=r"row 0: the row has messages, but the tokenizer has no chat template"):
        open_rows([{"messages": MESSAGES}], tokenizer=plain_tokenizer)
    with pytest.raises(DataError, match="nothing of the row is trained"):
        open_rows([{"messages": MESSAGES[:1]}])
    with pytest.raises(DataError, match=r"row 0: tools must be a list of objects"):
        open_rows([{"messages": MESSAGES, "tools": '{"name": "f"}'}])
    with pytest.raises(DataError, match="no rows in"):
        open_rows([])
    (tmp_path / "other.jsonl").write_text(json.dumps({"prompt": 3, "completion": "w"}))
    (tmp_path / "first.jsonl").write_text(json.dumps(good))
    with pytest.raises(DataError, match=r"other.jsonl row 0: expected a list of messages, got 3"):
        SupervisedDataset([tmp_path / "first.jsonl", tmp_path / "other.jsonl"], plain_tokenizer, max_length=9)


def test_tools_that_arrow_has_filled_up_are_refused_and_as_text_taken(open_rows, qwen_like):
    tools = [{"function": {"name": "f", "parameters": {"a": 1}}}, {"function": {"name": "g", "parameters": {"b": 1}}}]
    with pytest.raises(DataError, match=r"rows.parquet row 0: .* as JSON text"):
        open_rows([{"messages": MESSAGES, "tools": tools}], "rows.parquet")
    shows = copy.deepcopy(qwen_like)
    shows.chat_template = "{{ tools | tojson if tools }}" + qwen_like.chat_template
    assert len(open_rows([{"messages": MESSAGES, "tools": json.dumps(tools)}], "rows.parquet", tokenizer=shows)) == 1
    assert len(open_rows([{"messages": MESSAGES, "tools": tools}], tokenizer=shows)) == 1
    for train_on in ("assistant", "all"):
        with pytest.raises(DataError, match="leaves the tools out"):
            open_rows([{"messages": MESSAGES, "tools": tools}], train_on=train_on)


def test_a_tokenizer_without_offsets_or_end_token_is_refused(open_rows, plain_tokenizer):
    plain_tokenizer.eos_token = None
    with pytest.raises(DataError, match="no eos_token"):
        open_rows([{"text": "w1 w2"}], tokenizer=plain_tokenizer)


def test_a_subset_is_the_first_rows_or_chosen_by_the_seed(open_rows, plain_tokenizer):
    rows = [{"text": f"w{i} w1"} for i in range(20)]
    assert open_rows(rows, tokenizer=plain_tokenizer, max_samples=3).batch(range(3)).non_tensor_batch["index"].tolist() == [0, 1, 2]
    chosen = [open_rows(rows, tokenizer=plain_tokenizer, max_samples=3, seed=1).batch(range(3)) for _ in range(2)]
    first, second = (data.non_tensor_batch["index"].tolist() for data in chosen)
    assert first == second != [0, 1, 2]


def test_rows_of_a_batch_do_not_depend_on_each_other(open_rows):
    rows = [{"messages": MESSAGES}, {"text": "48 clips"}, {"prompt": "how many?", "completion": "48"}]
    dataset = open_rows(rows)
    together = dataset.batch([2, 0, 1])
    for place, position in enumerate([2, 0, 1]):
        alone = dataset.batch([position])
        for name in alone.columns:
            assert torch.equal(alone.ragged(name).values, together.ragged(name)[place])


def test_marks_of_messages_reach_the_mask_and_not_the_template(open_rows, qwen_like):
    marked = [MESSAGES[0], MESSAGES[1] | {"weight": 0}, MESSAGES[2], MESSAGES[3] | {"weight": 1, "train": True}]
    for name in ("rows.jsonl", "rows.parquet"):
        data = open_rows([{"messages": marked}], name).batch([0])
        plain = open_rows([{"messages": MESSAGES}], name).batch([0])
        assert parts(data, qwen_like)[0][1] == "1,234<|im_end|>"
        whole = [
            torch.cat([columns.ragged(key).rows()[0] for key in ("prompts", "responses")]).tolist() for columns in (data, plain)
        ]
        assert whole[0] == whole[1]
    with pytest.raises(DataError, match="row 0"):
        open_rows([{"messages": [MESSAGES[0], MESSAGES[1] | {"weight": 0}]}])


@pytest.mark.parametrize("depth", [190, 300, 3_000, 100_000])
@pytest.mark.parametrize("form", ["lines", "[list]"])
def test_a_row_that_is_nested_too_deep_is_an_error_with_its_file_and_number(tmp_path, qwen_like, depth, form):
    good = '{"text": "48 clips", "more": [1, "]"]}'
    deep = '{"text": "48", "more": ' + '{"a": [' * (depth // 2) + "1" + "]}" * (depth // 2) + "}"
    path = tmp_path / ("rows.json" if form.startswith("[") else "rows.jsonl")
    path.write_text(f"[{good}, {deep}]" if form.startswith("[") else f"{good}\n{deep}\n")
    if depth < 200:
        assert len(SupervisedDataset(path, qwen_like, max_length=100)) == 2
        return
    with pytest.raises(DataError, match=r"rows\.jsonl?.*row 1\b.* nested"):
        SupervisedDataset(path, qwen_like, max_length=100)


def test_json_text_in_a_row_that_is_nested_too_deep_is_an_error(open_rows):
    deep = "[" * 3_000 + "]" * 3_000
    with pytest.raises(DataError, match=r"row 0.*nested"):
        open_rows([{"messages": MESSAGES, "tools": deep}])


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lengths=st.lists(st.integers(1, 30), min_size=1, max_size=40), limit=st.integers(4, 30))
def test_rows_that_are_too_long_are_counted_together_or_left_out(open_rows, plain_tokenizer, lengths, limit):
    rows = [{"prompt": "w1", "completion": " w2" * length} for length in lengths]
    needed = [length + 2 for length in lengths]  # the prompt, and the end
    overlong = [number for number, length in enumerate(needed) if length > limit]
    if not overlong:
        assert len(open_rows(rows, tokenizer=plain_tokenizer, max_length=limit)) == len(rows)
        return
    first = max(overlong, key=lambda number: needed[number])
    with pytest.raises(DataError) as error:
        open_rows(rows, tokenizer=plain_tokenizer, max_length=limit)
    assert str(error.value).startswith(f"{len(overlong)} row")
    assert f"row {first}, which needs {needed[first]} tokens" in str(error.value)
    if len(overlong) == len(rows):
        with pytest.raises(DataError, match=f"data.max_length={max(needed)} all fit"):
            open_rows(rows, tokenizer=plain_tokenizer, max_length=limit, filter_overlong=True)
        return
    dataset = open_rows(rows, tokenizer=plain_tokenizer, max_length=limit, filter_overlong=True)
    assert dataset.num_filtered == len(overlong)
    indices = dataset.batch(range(len(dataset))).non_tensor_batch["index"].tolist()
    assert indices == [number for number in range(len(rows)) if number not in overlong]
