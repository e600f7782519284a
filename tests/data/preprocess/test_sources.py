from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers.rows import write_rows
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lockstep.data.preprocess.recipe import UnusableRow
from lockstep.data.preprocess.sources import SUFFIXES, find_files, read_rows
from lockstep.errors import DataError

NEVER = r"(?!)"


def make(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("")
    return folder


def found(source: Path | str, secondary: str = NEVER) -> dict[str, list[str]]:
    return {split: [str(file.name) for file in files] for split, files in find_files([str(source)], secondary).splits.items()}


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("train-00000-of-00001-8349d0765e6718df.parquet", "train"),
        ("main/test-00000-of-00001.parquet", "test"),
        ("val.jsonl", "validation"),
        ("hellaswag_val.jsonl", "validation"),
        ("default/validation/0000.parquet", "validation"),
        ("helpful-base/train.jsonl.gz", "train"),
        ("MATH/test/algebra/1.json", "test"),
        ("train/validation.parquet", "validation"),
        ("full_hh_style_test.jsonl", "test"),
        ("Rowan_hellaswag.validation.parquet", "validation"),
    ],
)
def test_the_split_is_in_the_name_of_the_file_or_of_a_folder(tmp_path, name, split):
    assert found(make(tmp_path / "data", name, "readme.json")) == {split: [f"data/{name}"]}


def test_a_folder_may_be_a_split_itself_and_its_parents_do_not_count(tmp_path):
    assert list(found(make(tmp_path / "test/train", "1.json", "2.json"))) == ["train"]
    assert list(found(make(tmp_path / "test/other", "train.json"))) == ["train"]


def test_shards_come_in_order_and_hidden_and_other_files_are_left_alone(tmp_path):
    names = [f"data/train-{i:05}-of-00012.parquet" for i in range(12)]
    make(tmp_path / "d", *reversed(names), ".cache/train.json", "train.csv", "dataset_infos.json")
    files = find_files([str(tmp_path / "d")], NEVER)
    assert [str(file.name) for file in files.splits["train"]] == [f"d/{name}" for name in names]
    assert files.unused == ["d/dataset_infos.json"]


def test_a_single_file_without_a_split_is_for_training(tmp_path):
    assert found(make(tmp_path, "pairs.jsonl") / "pairs.jsonl") == {"train": ["pairs.jsonl"]}


def test_several_sources_are_one_dataset(tmp_path):
    make(tmp_path, "a.train.parquet", "b.train.parquet", "a.test.parquet")
    files = find_files([str(tmp_path / name) for name in ("b.train.parquet", "a.train.parquet", "a.test.parquet")], NEVER)
    assert {split: len(here) for split, here in files.splits.items()} == {"train": 2, "test": 1}


@pytest.mark.parametrize(
    ("names", "message"),
    [(["a.json", "b.json"], r"no data files .*train, test or validation.*a\.json"), (["rows.csv"], "no data files")],
)
def test_a_folder_without_splits_is_an_error(tmp_path, names, message):
    with pytest.raises(DataError, match=message):
        found(make(tmp_path / "d", *names))


@pytest.mark.parametrize("source", ["nowhere", "./nowhere/here", "a/b/c", "/nowhere/here"])
def test_a_path_that_does_not_exist_is_not_asked_of_the_hub(source, monkeypatch):
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: pytest.fail("asked the hub"))
    with pytest.raises(DataError, match=rf"{source} does not exist"):
        found(source)


class Hub:
    """Answers like the hub, from a dict of revision -> names; keeps what was downloaded."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path, **revisions: list[str]) -> None:
        self.revisions, self.folder, self.downloaded = revisions, folder, list[tuple[str, Any]]()
        monkeypatch.setattr(huggingface_hub, "HfApi", lambda: self)
        monkeypatch.setattr(huggingface_hub, "hf_hub_download", self.download)

    def dataset_info(self, repo: str, *, revision: str | None, timeout: float) -> Any:
        assert timeout <= 10
        return SimpleNamespace(siblings=[SimpleNamespace(rfilename=name) for name in self.revisions[revision or "main"]])

    def download(self, repo: str, name: str, *, repo_type: str, revision: str | None, etag_timeout: float) -> str:
        assert (repo_type, etag_timeout <= 10) == ("dataset", True)
        self.downloaded.append((name, revision))
        return str(self.folder / name)


def test_only_the_files_that_are_used_are_downloaded_from_the_hub(tmp_path, monkeypatch):
    names = ["README.md", "main/train-0.parquet", "main/test-0.parquet", "socratic/train-0.parquet"]
    hub = Hub(monkeypatch, tmp_path, main=names)
    files = find_files(["openai/gsm8k"], "socratic")
    assert hub.downloaded == []
    assert [file.fetch() for file in files.splits["train"]] == [tmp_path / "main/train-0.parquet"]
    assert hub.downloaded == [("main/train-0.parquet", None)]


def test_a_dataset_that_is_a_script_is_read_from_the_hubs_parquet_copy(tmp_path, monkeypatch):
    copy = {"refs/convert/parquet": ["default/train/0000.parquet", "default/validation/0000.parquet"]}
    hub = Hub(monkeypatch, tmp_path, main=["hellaswag.py", "dataset_infos.json"], **copy)
    files = find_files(["Rowan/hellaswag"], NEVER)
    assert list(files.splits) == ["train", "validation"]
    files.splits["train"][0].fetch()
    assert hub.downloaded == [("default/train/0000.parquet", "refs/convert/parquet")]


@pytest.mark.parametrize("failing", ["dataset_info", "download"])
def test_a_hub_that_does_not_answer_says_how_to_pass_a_copy(tmp_path, monkeypatch, failing):
    hub = Hub(monkeypatch, tmp_path, main=["train.parquet"])

    def fail(*arguments: Any, **keywords: Any) -> None:
        raise OSError("[Errno -2] Name or service not known\nand more")

    setattr(hub, failing, fail)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", hub.download)
    with pytest.raises(DataError, match=r"openai/gsm8k.*Name or service not known\n.*hf download openai/gsm8k .*--source FOLDER"):
        find_files(["openai/gsm8k"], NEVER).splits["train"][0].fetch()


def test_without_a_connection_the_error_comes_at_once(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")  # nobody listens on the discard port
    start = time.monotonic()
    with pytest.raises(DataError, match="--source FOLDER"):
        found("openai/gsm8k")
    assert time.monotonic() - start < 15


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
