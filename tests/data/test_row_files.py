from __future__ import annotations

import json
import os
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.data import row_files
from lockstep.data.row_files import RowFiles, data_files, describe_data, row_sizes, text_sizes, warn_of_other_data
from lockstep.errors import DataError

NUM_ROWS = 50_000


@pytest.fixture(scope="module", params=[1_000, NUM_ROWS], ids=["small row groups", "one row group"])
def large_file(tmp_path_factory, request):
    """A short prompt and 200 bytes that do not compress in each row."""
    path = tmp_path_factory.mktemp("large") / "large.parquet"
    noise = np.random.default_rng(0).bytes(200 * NUM_ROWS)
    ballast = pa.Array.from_buffers(pa.binary(200), NUM_ROWS, [None, pa.py_buffer(noise)])
    table = pa.table({"prompt": [f"prompt {i}" for i in range(NUM_ROWS)], "ballast": ballast})
    pq.write_table(table, path, compression="none", row_group_size=request.param)
    return path


def test_reading_one_column_of_a_large_file_through_holds_a_small_part_of_it(large_file):
    before = pa.total_allocated_bytes()
    rows = RowFiles([large_file])
    assert len(rows) == NUM_ROWS
    most, expected = 0, 0
    for start, prompts in rows.batches("prompt"):
        assert start == expected
        assert prompts[0].as_py() == f"prompt {start}"
        expected += len(prompts)
        most = max(most, pa.total_allocated_bytes() - before)
    assert expected == NUM_ROWS
    assert most < large_file.stat().st_size / 2


def test_rows_that_were_read_are_kept_in_a_mapped_file_that_has_no_name(large_file, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    rows = RowFiles([large_file])
    before = pa.total_allocated_bytes()
    order = np.random.default_rng(1).permutation(NUM_ROWS)[:2_000].tolist()
    assert [row["prompt"] for row in rows.rows(order)] == [f"prompt {i}" for i in order]
    assert pa.total_allocated_bytes() - before < large_file.stat().st_size / 2
    assert os.listdir(tmp_path) == []
    allocated = pa.default_memory_pool().total_bytes_allocated()
    rows.rows(order)
    assert pa.default_memory_pool().total_bytes_allocated() - allocated < large_file.stat().st_size / 2  # nothing was decoded again


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_rows_come_in_the_order_asked_for_however_often_and_from_whichever_file(mixed_files, data):
    files, expected = mixed_files
    indices = data.draw(st.lists(st.integers(0, len(expected) - 1), max_size=20))
    assert files.rows(indices) == [expected[i] for i in indices]


@pytest.fixture(scope="module")
def mixed_files(tmp_path_factory):
    """Two parquet files with small row groups and a JSON file between them, with different columns and types."""
    folder = tmp_path_factory.mktemp("mixed")
    rows = [{"prompt": f"p{i}", "label": i} for i in range(7)]
    pq.write_table(pa.Table.from_pylist(rows), folder / "a.parquet", row_group_size=3)
    (folder / "b.jsonl").write_text('{"prompt": ["x"]}\n{"prompt": null, "label": "text"}\n')
    pq.write_table(pa.Table.from_pylist([{"prompt": 1.5, "more": {"a": [1, 2]}}] * 2), folder / "c.parquet")
    rows += [{"prompt": ["x"]}, {"prompt": None, "label": "text"}] + [{"prompt": 1.5, "more": {"a": [1, 2]}}] * 2
    columns = {"prompt": None, "label": None, "more": None}
    return RowFiles([folder / name for name in ("a.parquet", "b.jsonl", "c.parquet")]), [columns | row for row in rows]


def test_many_row_groups_take_no_more_open_files_than_one(tmp_path):
    table = pa.table({"prompt": [f"p{i}" for i in range(3_000)]})
    pq.write_table(table, tmp_path / "many.parquet", row_group_size=1)
    rows, before = RowFiles([tmp_path / "many.parquet"]), len(os.listdir("/proc/self/fd"))
    assert [row["prompt"] for row in rows.rows(range(3_000))] == table["prompt"].to_pylist()
    assert len(os.listdir("/proc/self/fd")) <= before + 1


def test_columns_of_categories_are_read(tmp_path):
    values = [f"kind {i // 100}" for i in range(1_000)]
    categories = pa.array(values).dictionary_encode()
    pq.write_table(pa.table({"data_source": categories}), tmp_path / "c.parquet", row_group_size=100)
    assert [row["data_source"] for row in RowFiles([tmp_path / "c.parquet"]).rows(range(1_000))] == values


def test_text_that_is_not_utf8_names_the_file(tmp_path):
    bad = pa.array([b"\xff"], pa.binary()).view(pa.string())
    pq.write_table(pa.table({"prompt": ["w1"], "note": bad}), tmp_path / "bad.parquet")
    with pytest.raises(DataError, match=r"cannot read .*bad\.parquet"):
        RowFiles([tmp_path / "bad.parquet"]).rows([0])


def test_a_temporary_folder_without_room_names_the_setting(large_file, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", "/nowhere")
    with pytest.raises(DataError, match=r"TMPDIR"):
        RowFiles([large_file]).rows([0])


def test_sizes_and_places_count_through_all_files(tmp_path):
    pq.write_table(pa.table({"text": ["abc", None, "é"], "number": [1, 2, 3]}), tmp_path / "a.parquet")
    (tmp_path / "b.jsonl").write_text('{"other": "ab"}\n{"text": "abcd", "other": ["a", {"b": "cd"}]}')
    rows = RowFiles([tmp_path / "a.parquet", tmp_path / "b.jsonl"])
    assert row_sizes(rows, ["text", "other", "number"]).tolist() == [3, 0, 2, 2, 7]
    assert rows.place(2) == f"{tmp_path / 'a.parquet'} row 2"
    assert rows.place(4) == f"{tmp_path / 'b.jsonl'} row 1"


def test_folders_and_patterns_stand_for_their_files_in_order(tmp_path, monkeypatch):
    folder = tmp_path / "lr=1e-6, (x)~[a]"
    (folder / "more").mkdir(parents=True)
    for name in ("b.jsonl", "a.jsonl", "c.json", ".hidden.jsonl", "notes.txt", "more/d.jsonl"):
        text = "[]" if name.endswith(".json") else f'{{"prompt": "{name}"}}\n'
        (folder / name).write_text(text)
    one, two, empty = (folder / name for name in ("a.jsonl", "b.jsonl", "c.json"))
    monkeypatch.setenv("HOME", str(tmp_path))
    assert data_files(folder) == [one, two, empty]
    assert data_files(f"~/{folder.name}") == [one, two, empty]
    monkeypatch.chdir(folder)
    assert list(map(str, data_files("?.jsonl"))) == ["a.jsonl", "b.jsonl"]
    assert list(map(str, data_files(["**/*.jsonl", "b.jsonl"]))) == ["a.jsonl", "b.jsonl", "more/d.jsonl", "b.jsonl"]
    assert [row["prompt"] for row in RowFiles(["*.jsonl"]).rows([0, 1])] == ["a.jsonl", "b.jsonl"]
    (folder / "x*.jsonl").write_text('{"prompt": "star"}\n')  # a file is that file, whatever its name looks like
    (folder / "xy.jsonl").write_text('{"prompt": "other"}\n')
    assert RowFiles(["x*.jsonl"]).rows([0]) == [{"prompt": "star"}]
    for nothing in ("*.parquet", tmp_path / "none", tmp_path, "no[x]"):
        with pytest.raises(DataError, match=r"none|tmp|parquet|no\[x\]"):
            RowFiles([nothing])


WORDS = st.none() | st.text("abc", max_size=4)


@given(
    st.lists(
        st.none()
        | st.lists(
            st.none() | st.fixed_dictionaries({"content": WORDS, "parts": st.none() | st.lists(WORDS), "n": st.integers(0, 9)})
        )
    ),
    st.integers(0, 3),
)
def test_sizes_of_nested_text_are_the_same_in_arrow_and_python(values, start):
    kind = pa.list_(pa.struct({"content": pa.string(), "parts": pa.large_list(pa.large_string()), "n": pa.int64()}))
    assert text_sizes(pa.array(values, kind)[start:]).tolist() == text_sizes(values[start:]).tolist()


def of_files(files, num_rows):
    return describe_data(SimpleNamespace(train_files=files), num_rows)


def warned(then, now):
    """The warnings, in one text."""
    said = []
    warn_of_other_data(then, now, said.append)
    return " ".join(said)


ROWS = [f'{{"prompt": "{i:09}"}}\n' for i in range(100)]


@pytest.fixture(autouse=True)
def small_ends(monkeypatch):
    monkeypatch.setattr(row_files, "_END_BYTES", 64)


def state(folder, rows, num_rows=20, name="rows.jsonl"):
    """What a checkpoint keeps of this file, read back."""
    (folder / name).write_text("".join(rows))
    return json.loads(json.dumps(of_files([str(folder / name)], num_rows)))


def test_the_same_rows_are_the_same_data_wherever_they_lie(tmp_path):
    (tmp_path / "moved").mkdir()
    then = state(tmp_path, ROWS)
    assert not warned(then, state(tmp_path / "moved", ROWS, name="other_name.jsonl"))
    assert not warned({"num_train_rows": 20}, then), "a checkpoint of a version without a digest"


@pytest.mark.parametrize("rows", [ROWS + ROWS[:1], ["x" * len(ROWS[0]), *ROWS[1:]], [*ROWS[:-1], "x" * len(ROWS[0])]])
def test_other_rows_are_said_also_where_as_many_are_trained_on(tmp_path, rows):
    assert "contents of data.train_files" in warned(state(tmp_path, ROWS), state(tmp_path, rows))


def test_another_number_of_rows_is_said_with_both(tmp_path):
    assert "100 training rows, now there are 60" in warned(state(tmp_path, ROWS, 100), state(tmp_path, ROWS[:60], 60))


def test_what_is_no_file_has_no_part(tmp_path):
    assert of_files("a://table", 3) == of_files(None, 3) == of_files([str(tmp_path / "none")], 3)
