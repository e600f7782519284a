from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers.rows import write_rows

from lockstep.data.preprocess import humaneval, mbpp
from lockstep.data.preprocess.recipe import UnusableRow
from lockstep.judging.code import compute_score

SHARED = Path(__file__).parents[4] / "shared/data/code"
HUMANEVAL = {
    "task_id": "HumanEval/0",
    "prompt": 'def add(a: int, b: int) -> int:\n    """The sum."""\n',
    "entry_point": "add",
    "canonical_solution": "    return a + b\n",
    "test": "def check(candidate):\n    assert candidate(1, 2) == 3\n",
}
MBPP = {
    "task_id": 601,
    "text": "Write a function to add.",
    "code": "def add(a, b):\r\n    return a + b",
    "test_setup_code": "",
    "test_list": ["assert add(1, 2) == 3", "assert add(0, 0) == 0"],
    "challenge_test_list": [],
}


@pytest.mark.parametrize(("module", "row"), [(humaneval, HUMANEVAL), (mbpp, MBPP)], ids=["humaneval", "mbpp"])
def test_the_reference_passes_the_tests_of_its_row_and_a_wrong_program_does_not(module, row):
    example = module.convert(row, module.RECIPE.instruction)
    truth = example.columns["reward_model"]["ground_truth"]
    assert compute_score(example.columns["response"], truth)["score"] == 1.0
    assert compute_score(example.columns["response"].replace("a + b", "a - b - 9"), truth)["score"] == 0.0
    assert "add" in example.prompt[0]["content"]
    assert example.prompt[0]["content"].endswith(module.RECIPE.instruction)


def test_mbpps_one_file_is_split_as_its_authors_say(run, tmp_path):
    rows = [MBPP | {"task_id": number} for number in (1, 10, 11, 510, 511, 600, 601, 974)]
    files = run("mbpp", write_rows(tmp_path / "mbpp.jsonl", rows))
    found = {name: [row["extra_info"]["task_id"] for row in rows] for name, rows in files.items()}
    assert found == {"train.parquet": [601, 974], "test.parquet": [11, 510]}
    assert "not used: split validation" in run.out


def test_a_file_with_one_of_mbpps_splits_gives_one_file(run, refuse, tmp_path):
    files = run("mbpp", write_rows(tmp_path / "mbpp.jsonl", [MBPP | {"task_id": 12}]))
    assert list(files) == ["test.parquet"]
    (tmp_path / "out/test.parquet").unlink()
    assert "no row belongs to a split" in refuse("mbpp", write_rows(tmp_path / "mbpp.jsonl", [MBPP | {"task_id": 2}]))


def test_mbpps_sanitized_form_is_read_too():
    row = {"task_id": 2, "prompt": "Add.", "code": MBPP["code"], "test_imports": ["import math"], "test_list": MBPP["test_list"]}
    truth = json.loads(mbpp.convert(row, "").columns["reward_model"]["ground_truth"])
    assert truth == {"test_list": MBPP["test_list"], "test_setup_code": "import math"}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [({"test_list": []}, "test_list is not a list of tests"), ({"task_id": None}, "task_id is not a positive number")],
)
def test_a_row_without_tests_or_number_says_why(changes, reason):
    with pytest.raises(UnusableRow, match=reason):
        mbpp.convert(MBPP | changes, "")
    assert mbpp.split_of(MBPP | {"task_id": None}) == "train"


@pytest.mark.skipif(not SHARED.is_dir(), reason="the shared data folder is not here")
def test_every_row_of_the_real_files_is_used(run):
    assert len(run("humaneval", SHARED / "humaneval.jsonl")["train.parquet"]) == 164
    files = run("mbpp", SHARED / "mbpp.jsonl")
    assert {name: len(rows) for name, rows in files.items()} == {"train.parquet": 374, "test.parquet": 500}
