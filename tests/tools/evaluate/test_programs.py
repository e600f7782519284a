from __future__ import annotations

import json
import runpy
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from helpers.rows import write_rows

from lockstep.data.preprocess.main import recipe_main
from lockstep.data.preprocess.recipe import UnusableRow
from lockstep.judging.code import compute_score
from lockstep.tools.evaluate.programs import HUMANEVAL, MBPP

SHARED = Path(__file__).parents[4] / "shared/data/code"
HUMANEVAL_ROW = {
    "task_id": "HumanEval/0",
    "prompt": 'def add(a: int, b: int) -> int:\n    """The sum."""\n',
    "entry_point": "add",
    "canonical_solution": "    return a + b\n",
    "test": "def check(candidate):\n    assert candidate(1, 2) == 3\n",
}
MBPP_ROW = {
    "task_id": 601,
    "text": "Write a function to add.",
    "code": "def add(a, b):\r\n    return a + b",
    "test_setup_code": "",
    "test_list": ["assert add(1, 2) == 3", "assert add(0, 0) == 0"],
    "challenge_test_list": [],
}


def rows_written(recipe, source, out):
    """File -> rows that `recipe_main` writes."""
    assert recipe_main(recipe, ["--source", str(source), "--out", str(out)]) == 0
    return {path.name: pq.read_table(path).to_pylist() for path in sorted(out.iterdir())}


@pytest.mark.parametrize(("recipe", "row"), [(HUMANEVAL, HUMANEVAL_ROW), (MBPP, MBPP_ROW)], ids=["humaneval", "mbpp"])
def test_the_reference_passes_the_tests_of_its_row_and_a_wrong_program_does_not(recipe, row):
    example = recipe.convert(row, recipe.instruction)
    truth = example.columns["reward_model"]["ground_truth"]
    assert compute_score(example.columns["response"], truth)["score"] == 1.0
    assert compute_score(example.columns["response"].replace("a + b", "a - b - 9"), truth)["score"] == 0.0
    assert "add" in example.prompt[0]["content"]
    assert example.prompt[0]["content"].endswith(recipe.instruction)


def test_mbpps_one_file_is_split_as_its_authors_say(tmp_path, capsys):
    rows = [MBPP_ROW | {"task_id": number} for number in (1, 10, 11, 510, 511, 600, 601, 974)]
    files = rows_written(MBPP, write_rows(tmp_path / "mbpp.jsonl", rows), tmp_path / "out")
    found = {name: [row["extra_info"]["task_id"] for row in rows] for name, rows in files.items()}
    assert found == {"train.parquet": [601, 974], "test.parquet": [11, 510]}
    assert "not used: split validation" in capsys.readouterr().out


def test_a_file_with_one_of_mbpps_splits_gives_one_file_and_one_with_none_is_an_error(tmp_path):
    files = rows_written(MBPP, write_rows(tmp_path / "mbpp.jsonl", [MBPP_ROW | {"task_id": 12}]), tmp_path / "out")
    assert list(files) == ["test.parquet"]
    neither = write_rows(tmp_path / "mbpp.jsonl", [MBPP_ROW | {"task_id": 2}])
    assert recipe_main(MBPP, ["--source", str(neither), "--out", str(tmp_path / "none")]) == 1
    assert not list((tmp_path / "none").glob("*"))


def test_mbpps_sanitized_form_is_read_too():
    tests = MBPP_ROW["test_list"]
    row = {"task_id": 2, "prompt": "Add.", "code": MBPP_ROW["code"], "test_imports": ["import math"], "test_list": tests}
    truth = json.loads(MBPP.convert(row, "").columns["reward_model"]["ground_truth"])
    assert truth == {"test_list": tests, "test_setup_code": "import math"}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [({"test_list": []}, "test_list is not a list of tests"), ({"task_id": None}, "task_id is not a positive number")],
)
def test_a_row_without_tests_or_number_says_why(changes, reason):
    with pytest.raises(UnusableRow, match=reason):
        MBPP.convert(MBPP_ROW | changes, "")
    assert MBPP.split_of(MBPP_ROW | {"task_id": None}) == "train"


@pytest.mark.skipif(not SHARED.is_dir(), reason="the shared data folder is not here")
def test_every_row_of_the_real_files_is_used(tmp_path):
    assert len(rows_written(HUMANEVAL, SHARED / "humaneval.jsonl", tmp_path / "human")["train.parquet"]) == 164
    files = rows_written(MBPP, SHARED / "mbpp.jsonl", tmp_path / "mbpp")
    assert {name: len(rows) for name, rows in files.items()} == {"train.parquet": 374, "test.parquet": 500}


@pytest.mark.parametrize("name", ["humaneval", "mbpp"])
def test_the_example_is_the_command_of_its_recipe(name):
    script = Path(__file__).parents[3] / f"examples/data_preprocess/{name}.py"
    found = runpy.run_path(str(script))
    assert found["recipe_main"] is recipe_main
    assert {"humaneval": HUMANEVAL, "mbpp": MBPP}[name] in found.values()
