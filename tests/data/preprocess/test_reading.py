from __future__ import annotations

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers.rows import write_rows
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lockstep.data.preprocess.reading import SUFFIXES, read_rows
from lockstep.data.preprocess.recipe import UnusableRow
from lockstep.errors import DataError


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(texts=st.lists(st.text(st.characters(codec="utf-8"), max_size=10), min_size=1, max_size=5))
def test_every_format_gives_the_same_rows(tmp_path, texts):
    rows = [{"text": text, "nested": {"list": [1, 2]}} for text in texts]
    for suffix in SUFFIXES:
        assert list(read_rows(write_rows(tmp_path / f"rows{suffix}", rows))) == rows


def test_a_json_file_may_hold_one_object_or_one_a_line(tmp_path):
    (tmp_path / "one.json").write_text(json.dumps({"a": 1}, indent=2))
    (tmp_path / "lines.json").write_text('{"a": 1}\n{"a": 2}\n')
    assert list(read_rows(tmp_path / "one.json")) == [{"a": 1}]
    assert list(read_rows(tmp_path / "lines.json")) == [{"a": 1}, {"a": 2}]


def test_a_line_that_cannot_be_read_is_an_unusable_row_and_the_others_are_read(tmp_path):
    (tmp_path / "rows.jsonl").write_bytes(b'{"a": 1}\n{"a": \n\xff\xfe\n[1]\n\n{"a": 2}\n{"a"')
    read = list(read_rows(tmp_path / "rows.jsonl"))
    assert [str(row) if isinstance(row, UnusableRow) else row for row in read] == [
        {"a": 1}, "not JSON", "not valid UTF-8", "not a JSON object", {"a": 2}, "not JSON",
    ]  # fmt: skip


def test_a_text_of_parquet_that_is_not_utf8_is_an_unusable_row_and_the_others_are_read(tmp_path):
    texts = pa.array([b"one", b"\xff", b"three"], pa.binary()).view(pa.string())
    pq.write_table(pa.table({"text": texts}), tmp_path / "rows.parquet")
    first, second, third = read_rows(tmp_path / "rows.parquet")
    assert (first, str(second), third) == ({"text": "one"}, "not valid UTF-8", {"text": "three"})


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("corrupt.parquet", b"PAR1 nothing else"),
        ("empty.parquet", b""),
        ("corrupt.json", b'[{"a": 1}'),
        ("corrupt.jsonl.gz", b"no gzip"),
        ("cut.jsonl.gz", None),
        ("rows.csv", b"a\n1\n"),
        ("absent.jsonl", False),
    ],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path, name, content):
    path = tmp_path / name
    if content is None:
        write_rows(path, [{"a": "x" * 1000}] * 100)
        path.write_bytes(path.read_bytes()[:-20])
    elif content is not False:
        path.write_bytes(content)
    with pytest.raises(DataError, match=name):
        list(read_rows(path))
