from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from helpers.rows import write_rows

from lockstep.cli import COMMANDS
from lockstep.data.preprocess.main import main
from lockstep.data.row_files import RowFiles

EXAMPLES = Path(__file__).parents[3] / "examples/data_preprocess"
GOOD = {"question": "1 + 1?", "answer": "#### 2"}


def test_unusable_rows_are_counted_with_a_reason_and_the_first_example(run, tmp_path):
    bad = {"question": "Why?", "answer": "Because."}
    path = tmp_path / "gsm8k/train.jsonl"
    write_rows(path, [GOOD, bad, bad | {"question": "How?"}, {"problem": "other columns"}, GOOD, {**GOOD, "question": "\ud800"}])
    with path.open("ab") as file:
        file.write(b"\xff\n{\n")
    files = run("gsm8k", path.parent)
    assert [row["extra_info"]["index"] for row in files["train.parquet"]] == [0, 4]
    table = [line.split(maxsplit=1) for line in run.out.splitlines() if line.startswith("  ")]
    assert table[0][1].split() == ["reason", "first", "example"]
    assert table[1][0] == "2"
    assert table[1][1].startswith('the answer has no \'####\'  train.jsonl row 1: {"question": "Why?", ')
    reasons = {"no column 'question'", "not valid Unicode", "not valid UTF-8", "not JSON"}
    assert [count for count, _ in table[2:]] == ["1"] * 4
    assert {reason for reason in reasons if reason in run.out} == reasons
    assert "train: 8 rows read, 2 written to" in run.out
    assert "train: rows that cannot be used: 6\n" in run.out


def test_files_with_different_columns_are_read_row_by_row(run, tmp_path):
    write_rows(tmp_path / "d/train-0.parquet", [GOOD | {"extra": 1}])
    write_rows(tmp_path / "d/train-1.parquet", [{"question": 5, "answer": "#### 2"}])
    write_rows(tmp_path / "d/train-2.parquet", [{"answer": "#### 2", "question": "reordered"}])
    files = run("gsm8k", tmp_path / "d")
    assert [row["extra_info"]["question"] for row in files["train.parquet"]] == ["1 + 1?", "reordered"]
    assert "question is int, not text" in run.out


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"prompt": "1 + 1?", "response": "2"}] * 3, r"3  no column 'question'"),
        ([], "there are none"),
    ],
)
def test_a_split_without_a_usable_row_is_an_error_and_nothing_is_written(refuse, tmp_path, rows, message):
    write_rows(tmp_path / "d/train.jsonl", [GOOD])
    write_rows(tmp_path / "d/test.jsonl", rows)
    error = refuse("gsm8k", tmp_path / "d")
    assert "no row of the split 'test' can be used" in error
    assert message in error


def test_a_corrupt_file_is_an_error_and_what_was_there_stays(run, tmp_path, capsys):
    source = write_rows(tmp_path / "d/train.jsonl", [GOOD]).parent
    before = run("gsm8k", source)
    write_rows(source / "train.jsonl", [GOOD] * 3)
    (source / "test.parquet").write_bytes(b"PAR1")
    assert main(["gsm8k", "--source", str(source), "--out", str(tmp_path / "out")]) == 1
    assert "cannot read" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["train.parquet"]
    assert pq.read_table(tmp_path / "out/train.parquet").to_pylist() == before["train.parquet"]


def test_a_held_out_file_of_another_source_is_said(run, tmp_path):
    row = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    run("chat", write_rows(tmp_path / "both/train.jsonl", [row]), write_rows(tmp_path / "both/test.jsonl", [row]))
    assert "warning" not in run.out
    run("chat", tmp_path / "both/train.jsonl")
    assert f"warning: {tmp_path}/out/test.parquet was there before" in run.out


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path, capsys):
    source = write_rows(tmp_path / "train.jsonl", [GOOD])
    assert main(["gsm8k", "--source", str(source), "--out", str(source)]) == 1
    assert f"error: cannot write to {source}" in capsys.readouterr().err


def test_the_files_are_what_the_dataset_reads(run, tmp_path):
    run("gsm8k", write_rows(tmp_path / "train.jsonl", [GOOD] * 3))
    rows = RowFiles([tmp_path / "out/train.parquet"])
    assert len(rows) == 3
    assert rows.columns == ["data_source", "prompt", "ability", "reward_model", "response", "extra_info"]


def test_a_long_file_is_cut_into_row_groups_that_are_read_alone(run, tmp_path, monkeypatch):
    monkeypatch.setattr("lockstep.data.preprocess.main._ROW_GROUP", 4)
    run("gsm8k", write_rows(tmp_path / "train.jsonl", [GOOD] * 10))
    assert pq.ParquetFile(tmp_path / "out/train.parquet").num_row_groups == 3


def test_the_command_is_in_the_table_and_brings_no_torch():
    module = COMMANDS["preprocess"][0]
    code = f"import sys, {module}; assert not {{'torch', 'transformers', 'huggingface_hub'}} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=240)


@pytest.mark.parametrize("script", ["gsm8k", "math_dataset", "hellaswag", "full_hh_rlhf"])
def test_the_examples_are_the_command(script, tmp_path, monkeypatch, capsys):
    source = (EXAMPLES / f"{script}.py").read_text()
    monkeypatch.setattr(sys, "argv", [f"{script}.py", "--source", str(tmp_path / "nowhere"), "--out", str(tmp_path / "out")])
    with pytest.raises(SystemExit) as end:
        exec(compile(source, script, "exec"), {"__name__": "__main__"})
    assert end.value.code == 1
    assert "nowhere does not exist" in capsys.readouterr().err
