from __future__ import annotations

import copy
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers.errors import raises
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.data import rl_dataset
from lockstep.data.encoder import truncate
from lockstep.data.rl_dataset import RLHFDataset
from lockstep.data.tag import Tag
from lockstep.errors import ConfigError, DataError

SAMPLES = Path(__file__).parents[3] / "shared/data"


def data_config(**changes: Any) -> SimpleNamespace:
    defaults = {
        "prompt_key": "prompt",
        "max_prompt_length": 8,
        "filter_overlong_prompts": False,
        "truncation": "error",
        "apply_chat_template_kwargs": {},
        "shuffle": True,
        "seed": 0,
    }
    return SimpleNamespace(**defaults | changes)


def words(*numbers: int) -> str:
    return " ".join(f"w{n}" for n in numbers)


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=2)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize("name", ["rows.parquet", "rows.json", "rows.jsonl"])
def test_every_format_gives_the_same_items_with_nested_columns_as_plain_objects(tokenizer, tmp_path, name):
    rows = [
        {
            "prompt": [{"role": "system", "content": "w1"}, {"role": "user", "content": f"w{i}"}],
            "data_source": "a/b",
            "reward_model": {"style": "rule", "ground_truth": str(i)},
            "extra_info": {"tags": ["x", "y"], "index": i},
        }
        for i in range(5)
    ]
    dataset = RLHFDataset(write(tmp_path / name, rows), tokenizer, data_config())
    assert len(dataset) == 5
    for i, row in enumerate(rows):
        ids = tokenizer.convert_tokens_to_ids(["<system>", "w1", "<user>", f"w{i}", "<assistant>"])
        assert dataset[i] == row | {"raw_prompt": row["prompt"], "prompt_ids": ids, "index": i}


def test_json_lines_may_be_in_a_json_file_and_hold_any_unicode(tokenizer, tmp_path):
    path = tmp_path / "lines.json"
    path.write_text('{"prompt": "w1", "note": "a\u2028b"}\n\n{"prompt": "w2"}\n', encoding="utf-8")
    dataset = RLHFDataset(str(path), tokenizer, data_config())
    assert [(item["raw_prompt"], item["note"]) for item in dataset] == [("w1", "a\u2028b"), ("w2", None)]


def test_only_the_prompt_is_required_and_a_missing_data_source_stays_missing(tokenizer, tmp_path):
    item = RLHFDataset(write(tmp_path / "p.parquet", [{"prompt": "w3"}]), tokenizer, data_config())[0]
    assert set(item) == {"prompt", "raw_prompt", "prompt_ids", "index"}


def test_a_string_is_one_user_message_with_a_template_and_itself_without(tokenizer, tmp_path):
    path = write(tmp_path / "p.parquet", [{"prompt": "w3 w4"}])
    as_message = RLHFDataset(path, tokenizer, data_config())[0]["prompt_ids"]
    assert tokenizer.convert_ids_to_tokens(as_message) == ["<user>", "w3", "w4", "<assistant>"]
    tokenizer.chat_template = None
    assert tokenizer.convert_ids_to_tokens(RLHFDataset(path, tokenizer, data_config())[0]["prompt_ids"]) == ["w3", "w4"]


def test_chat_template_arguments_reach_the_template(tokenizer, tmp_path):
    config = data_config(apply_chat_template_kwargs={"suffix": "w9"})
    item = RLHFDataset(write(tmp_path / "p.parquet", [{"prompt": "w3"}]), tokenizer, config)[0]
    assert tokenizer.decode(item["prompt_ids"][-1:]) == "w9"


def test_files_are_numbered_one_after_the_other_and_lacking_columns_are_none(tokenizer, tmp_path):
    paths = [
        write(tmp_path / "a.parquet", [{"prompt": words(i), "label": i} for i in range(3)]),
        write(tmp_path / "b.jsonl", [{"prompt": words(i)} for i in range(3, 5)]),
    ]
    items = list(RLHFDataset(paths, tokenizer, data_config()))
    assert [(i["index"], i["raw_prompt"], i["label"]) for i in items] == [(n, f"w{n}", n if n < 3 else None) for n in range(5)]


def test_filter_keeps_the_numbers_of_rows_and_counts_what_it_left_out(tokenizer, tmp_path, capsys):
    rows = [{"prompt": words(*range(n))} for n in (1, 9, 2, 7, 6)]  # the template adds two tokens to each
    dataset = RLHFDataset(
        write(tmp_path / "p.parquet", rows), tokenizer, data_config(max_prompt_length=8, filter_overlong_prompts=True)
    )
    assert [item["index"] for item in dataset] == [0, 2, 4]
    assert dataset.num_filtered == 2
    assert capsys.readouterr().out.count("\n") == 1


def test_several_items_at_once_are_the_items_one_by_one(qwen_like, tmp_path):
    rows = [{"prompt": text, "n": n} for n, text in enumerate(["48 clips", "naïve", "It's June", "日本語", "<|im_end|> 7"] * 3)]
    path = write(tmp_path / "p.parquet", rows)
    dataset = RLHFDataset(path, qwen_like, data_config(max_prompt_length=200))
    positions = [7, 0, 14, 7, 3]
    assert dataset.__getitems__(positions) == [dataset[i] for i in positions]
    assert [item["n"] for item in dataset.__getitems__(positions)] == positions
    assert dataset.__getitems__([]) == []
    with pytest.raises(IndexError):
        dataset[15]


def test_a_subclass_says_what_an_item_is_for_several_at_once_too(tokenizer, tmp_path):
    class Marked(RLHFDataset):
        def __getitem__(self, item):
            return super().__getitem__(item) | {"mark": item}

    dataset = Marked(write(tmp_path / "p.parquet", [{"prompt": "w1"}, {"prompt": "w2"}]), tokenizer, data_config())
    assert [(item["raw_prompt"], item["mark"]) for item in dataset.__getitems__([1, 0])] == [("w2", 1), ("w1", 0)]


def test_rows_that_were_chosen_are_the_only_ones_that_count(tokenizer, tmp_path):
    rows = [{"prompt": words(n), "data_source": "a"} for n in range(3)] + [
        {"prompt": words(*range(30)), "data_source": "b"},
        {"prompt": ""},
    ]
    path = write(tmp_path / "p.parquet", rows)
    dataset = RLHFDataset(path, tokenizer, data_config(shuffle=False), max_samples=3)
    assert dataset.tags() == {Tag("a", has_truth=False)}
    with pytest.raises(DataError, match="row 4: the prompt is empty"):
        RLHFDataset(path, tokenizer, data_config())


@pytest.mark.parametrize(
    ("prompt", "fault"),
    [
        ("", ": the prompt is empty"),
        (words(*range(30)), r" \(32 tokens\)"),
        ([{"role": "user", "content": "w1"}], ": the prompt is a message list"),
    ],
)
def test_a_row_of_several_files_is_named_by_its_file_and_its_number_there(tokenizer, tmp_path, prompt, fault):
    if isinstance(prompt, list):
        tokenizer = copy.deepcopy(tokenizer)
        tokenizer.chat_template = None
    files = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    files[0].write_text('{"prompt": "w1"}\n' * 3)
    files[1].write_text('{"prompt": "w1"}\n' + json.dumps({"prompt": prompt}) + "\n")
    with pytest.raises(DataError, match=rf"b\.jsonl row 1{fault}"):
        RLHFDataset(list(map(str, files)), tokenizer, data_config(max_prompt_length=20))


def test_text_of_parquet_that_is_not_utf8_names_the_row(tokenizer, tmp_path):
    prompts = pa.array([b"w1", b"\xff"], pa.binary()).view(pa.string())
    pq.write_table(pa.table({"prompt": prompts}), tmp_path / "p.parquet")
    with pytest.raises(DataError, match="row 1: the prompt is not valid UTF-8"):
        RLHFDataset(str(tmp_path / "p.parquet"), tokenizer, data_config())


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_the_filter_keeps_what_tokenising_everything_would_keep(qwen_like, tmp_path_factory, data):
    texts = data.draw(st.lists(st.text(st.characters(codec="utf-8"), min_size=1, max_size=60), min_size=1, max_size=8))
    limit = data.draw(st.integers(20, 120))
    path = write(tmp_path_factory.mktemp("filter") / "p.parquet", [{"prompt": text} for text in texts])
    lengths = [len(item["prompt_ids"]) for item in RLHFDataset(path, qwen_like, data_config(max_prompt_length=10_000))]
    fitting = [i for i, length in enumerate(lengths) if length <= limit]
    config = data_config(max_prompt_length=limit, filter_overlong_prompts=True)
    if fitting:
        assert [item["index"] for item in RLHFDataset(path, qwen_like, config)] == fitting
    else:
        with pytest.raises(DataError, match="all"):
            RLHFDataset(path, qwen_like, config)


def test_max_samples_is_a_seeded_subset_when_shuffled_and_the_first_rows_otherwise(tokenizer, tmp_path):
    path = write(tmp_path / "p.parquet", [{"prompt": words(n)} for n in range(40)])

    def chosen(max_samples: int, **changes: Any) -> list[int]:
        items = list(RLHFDataset(path, tokenizer, data_config(**changes), max_samples))
        assert all(item["raw_prompt"] == f"w{item['index']}" for item in items)
        return [item["index"] for item in items]

    assert chosen(5, shuffle=False) == [0, 1, 2, 3, 4]
    assert chosen(5, seed=1) == chosen(5, seed=1)
    assert len({tuple(chosen(5, seed=s)) for s in range(4)}) > 1
    assert len(set(chosen(5, seed=1))) == 5
    assert chosen(100) == chosen(-1) == list(range(40))
    with pytest.raises(ConfigError, match="max_samples"):
        chosen(0)
    with raises(ConfigError, "data.seed"):
        chosen(5, seed=None)


@given(ids=st.lists(st.integers(0, 9), max_size=30), limit=st.integers(1, 30))
def test_truncation_keeps_what_its_name_says(ids, limit):
    kept = min(limit, len(ids))
    assert truncate(ids, limit, "left") == ids[len(ids) - kept :]
    assert truncate(ids, limit, "right") == ids[:kept]
    middle = truncate(ids, limit, "middle")
    head = kept // 2
    assert len(middle) == kept
    assert middle[:head] == ids[:head]
    assert middle[head:] == ids[len(ids) - (kept - head) :]


@pytest.mark.parametrize("side", ["left", "right", "middle"])
def test_items_are_truncated_to_the_limit_on_the_configured_side(tokenizer, tmp_path, side):
    path = write(tmp_path / "p.parquet", [{"prompt": words(*range(10))}])
    full = RLHFDataset(path, tokenizer, data_config(max_prompt_length=100))[0]["prompt_ids"]
    cut = RLHFDataset(path, tokenizer, data_config(max_prompt_length=5, truncation=side))[0]["prompt_ids"]
    assert cut == truncate(full, 5, side)
    assert len(cut) == 5


def test_overlong_prompts_fail_at_construction_with_their_number_the_first_rows_and_both_keys(tokenizer, tmp_path):
    rows = [{"prompt": words(*range(10 if n % 2 else 1))} for n in range(14)]
    path = write(tmp_path / "p.parquet", rows)
    listed = ", ".join(f"{path} row {n} (12 tokens)" for n in (1, 3, 5))
    with raises(DataError, "data.max_prompt_length") as error:
        RLHFDataset(path, tokenizer, data_config())
    said = str(error.value)
    assert said.startswith("7 ")
    assert listed in said
    assert all(key in said for key in ("data.truncation", "data.filter_overlong_prompts"))
    with raises(DataError, "data.max_prompt_length") as error:
        RLHFDataset(path, tokenizer, data_config(shuffle=False), max_samples=3)
    assert "row 1 (12 tokens);" in str(error.value)


def test_where_not_all_prompts_were_measured_the_error_does_not_say_that_it_has_counted_them(tokenizer, tmp_path, monkeypatch):
    path = write(tmp_path / "p.parquet", [{"prompt": words(*range(10))}] * 5)
    monkeypatch.setattr(rl_dataset, "_CHECK_BYTES", 1)
    with pytest.raises(DataError, match=r"^at least 1 prompt is longer .*row 0 \(12 tokens\);"):
        RLHFDataset(path, tokenizer, data_config())


def test_a_prompt_that_was_not_measured_at_start_fails_when_it_is_read(tokenizer, tmp_path, monkeypatch, capsys):
    # By bytes the first is larger, by tokens the second is longer.
    path = write(tmp_path / "p.parquet", [{"prompt": "x" * 100}, {"prompt": words(*range(10))}])
    monkeypatch.setattr(rl_dataset, "_CHECK_BYTES", 1)
    dataset = RLHFDataset(path, tokenizer, data_config())
    assert "2 prompts may be longer" in capsys.readouterr().out
    assert len(dataset[0]["prompt_ids"]) == 3
    with pytest.raises(DataError, match=r"row 1 \(12 tokens\)"):
        dataset[1]
    assert [item["index"] for item in RLHFDataset(path, tokenizer, data_config(filter_overlong_prompts=True))] == [0]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("absent.parquet", None, "absent.parquet does not exist"),
        ("corrupt.parquet", b"PAR1 nothing else", r"cannot read .*corrupt.parquet as parquet"),
        ("corrupt.json", b'[{"prompt": "w1"}', r"cannot read .*corrupt.json as JSON"),
        ("corrupt.jsonl", b'{"prompt": "w1"}\n{"prompt"', r"cannot read .*corrupt.jsonl .*line 2"),
        ("binary.jsonl", b"\xff\xfe", r"cannot read .*binary.jsonl"),
        ("numbers.json", b"[1, 2]", r"row 0 is a int, not an object"),
        ("rows.csv", b"prompt\nw1\n", r"unknown extension '.csv'.*\.parquet, \.json or \.jsonl"),
        (
            "columns.jsonl",
            b'{"question": "w1", "answer": "w2"}',
            r"no column 'prompt'.*answer.*question.*data.prompt_key",
        ),
        ("empty.jsonl", b"", "no rows"),
        ("empty.json", b"[]", "no rows"),
        ("none.jsonl", b'{"prompt": "w1"}\n{"prompt": null}', "row 1: .*not None"),
        ("lacking.jsonl", b'{"prompt": "w1"}\n{"question": "w1"}', "row 1: .*not None"),
        ("blank.jsonl", b'{"prompt": ""}', "row 0: the prompt is empty"),
        ("no_messages.jsonl", b'{"prompt": []}', "row 0: the prompt is empty"),
        ("number.jsonl", b'{"prompt": 3}', "row 0: .*string or a list of messages, not 3"),
        ("no_role.jsonl", b'{"prompt": [{"content": "w1"}]}', "row 0: .*role and content"),
        ("no_content.jsonl", b'{"prompt": [{"role": "user", "content": null}]}', "row 0: .*role and content"),
        ("half.jsonl", b'{"prompt": "w1"}\n{"prompt": "\\ud800"}', "row 1: the prompt is not valid Unicode"),
        ("mixed.jsonl", b'{"prompt": "w1"}\n{"prompt": [{"role": "pirate", "content": "w1"}]}', "row 1: .*role pirate"),
    ],
)
def test_unusable_data_fails_at_construction(tokenizer, tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        RLHFDataset(str(tmp_path / name), tokenizer, data_config())


def test_a_second_file_without_the_prompt_column_is_named(tokenizer, tmp_path):
    paths = [write(tmp_path / "a.parquet", [{"prompt": "w1"}]), write(tmp_path / "b.parquet", [{"text": "w1"}])]
    with pytest.raises(DataError, match=r"b\.parquet has no column 'prompt'.*text"):
        RLHFDataset(paths, tokenizer, data_config())


def test_a_dataset_emptied_by_the_filter_is_an_error(tokenizer, tmp_path):
    path = write(tmp_path / "p.parquet", [{"prompt": words(*range(10))}])
    with raises(DataError, "data.max_prompt_length"):
        RLHFDataset(path, tokenizer, data_config(filter_overlong_prompts=True))


def test_a_message_list_without_a_chat_template_is_an_error(plain_tokenizer, tmp_path):
    path = write(tmp_path / "p.parquet", [{"prompt": [{"role": "user", "content": "w1"}]}])
    with pytest.raises(DataError, match="no chat template"):
        RLHFDataset(path, plain_tokenizer, data_config())


def test_roles_that_the_template_refuses_fail_at_construction(tokenizer, tmp_path):
    rows = [{"prompt": [{"role": role, "content": "w1"}]} for role in ("user", "user", "pirate", "user")]
    path = write(tmp_path / "p.parquet", rows)
    for truncation in ("error", "left"):
        with pytest.raises(DataError, match=r"row 2: .*template.*role pirate"):
            RLHFDataset(path, tokenizer, data_config(truncation=truncation))


def test_a_content_that_the_template_refuses_fails_at_construction(tokenizer, tmp_path):
    tokenizer.chat_template = (
        "{% if messages[0]['content'] == 'w3' %}{{ raise_exception('not w3') }}{% endif %}" + tokenizer.chat_template
    )
    path = write(tmp_path / "p.parquet", [{"prompt": words(n)} for n in range(5)])
    with pytest.raises(DataError, match=r"row 3: .*template.*not w3"):
        RLHFDataset(path, tokenizer, data_config())


def test_a_prompt_without_tokens_is_an_error(plain_tokenizer, tmp_path):
    with pytest.raises(DataError, match="row 0: the prompt has no tokens"):
        RLHFDataset(write(tmp_path / "p.parquet", [{"prompt": "  "}]), plain_tokenizer, data_config())[0]


def test_unknown_truncation_is_a_config_error(tokenizer, tmp_path):
    with raises(ConfigError, "data.truncation"):
        RLHFDataset(write(tmp_path / "p.parquet", [{"prompt": "w1"}]), tokenizer, data_config(truncation="top"))


@pytest.mark.skipif(not SAMPLES.is_dir(), reason="the shared data folder is not here")
@pytest.mark.parametrize(
    ("name", "prompt_key"),
    [
        ("hf_parquet_samples/Dahoas_full-hh-rlhf.train.parquet", "prompt"),
        ("hf_parquet_samples/openai_gsm8k.main.train.parquet", "question"),
        ("hf_parquet_samples/Rowan_hellaswag.train.parquet", "ctx"),
        ("hh_rlhf/full_hh_style_test.jsonl", "prompt"),
    ],
)
def test_real_files_open_and_every_row_is_tokenised(tokenizer, name, prompt_key):
    config = data_config(prompt_key=prompt_key, max_prompt_length=100_000)
    dataset = RLHFDataset(str(SAMPLES / name), tokenizer, config)
    items = list(dataset)
    assert len(items) == len(dataset) >= 50
    assert all(item["prompt_ids"] and item["raw_prompt"] == item[prompt_key] for item in items)


@pytest.mark.parametrize(
    "more", [{}, {"weights": {"rule": 1.0, "model": 0.5}}, {"test_cases": {"inputs": ["1"], "outputs": ["1"]}}]
)
def test_tags_are_those_of_the_chosen_rows_whatever_the_format(tokenizer, tmp_path, more):
    rows = [
        {"prompt": "w1", "data_source": "x", "reward_model": {"style": "rule", "ground_truth": str(i)} | (more if i == 7 else {})}
        for i in range(10)
    ]
    rows[3]["data_source"], rows[4]["reward_model"]["style"] = "y", "model"
    rows[5]["data_source"] = None
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet", row_group_size=4)
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    for limit in (-1, 5):
        expected = {Tag.of(row["data_source"], row["reward_model"]) for row in rows[: limit if limit > 0 else None]}
        for name in ("rows.parquet", "rows.jsonl"):
            assert RLHFDataset(str(tmp_path / name), tokenizer, data_config(shuffle=False), limit).tags() == expected
