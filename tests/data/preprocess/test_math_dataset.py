from __future__ import annotations

import json

import pytest
from helpers.rows import write_rows

from lockstep.data.preprocess.math_dataset import RECIPE, convert
from lockstep.data.preprocess.recipe import UnusableRow
from lockstep.rewards.graders import default_compute_score


def row(problem: str = "What is half of $x$ at $x = 1$?") -> dict[str, str]:
    solution = r"First \boxed{1}, but half of it is $\boxed{\frac{1}{2}}$."
    return {"problem": problem, "level": "Level 2", "type": "Algebra", "solution": solution}


def test_the_last_box_is_the_ground_truth_and_the_solution_scores_full():
    example = convert(row(), RECIPE.instruction)
    assert example.columns["reward_model"] == {"style": "rule", "ground_truth": r"\frac{1}{2}"}
    assert example.prompt == [{"role": "user", "content": f"{row()['problem']}\n\n{RECIPE.instruction}"}]
    assert example.extra_info["level"] == "Level 2"
    assert example.extra_info["subject"] == "Algebra"
    assert r"\boxed{}" in RECIPE.instruction
    assert default_compute_score(RECIPE.hub_id, row()["solution"], r"\frac{1}{2}") == 1.0


@pytest.mark.parametrize("solution", ["It is one half.", r"\boxed{1", r"\boxed{}", r"\boxed{ }"])
def test_a_solution_without_an_answer_in_a_box_cannot_be_used(solution):
    with pytest.raises(UnusableRow, match=r"no \\boxed\{\}"):
        convert(row() | {"solution": solution}, RECIPE.instruction)


def test_math_500_has_an_answer_column_a_tag_of_its_own_and_only_a_test_split(run, tmp_path):
    rows = [
        {
            "problem": "What is 1 + 1?",
            "solution": r"It is $\boxed{2}$.",
            "answer": "2",
            "subject": "Prealgebra",
            "level": 1,
            "unique_id": "test/prealgebra/1.json",
        }
    ]
    (written,) = run("math", write_rows(tmp_path / "MATH-500/test.jsonl", rows).parent)["test.parquet"]
    assert written["data_source"] == "HuggingFaceH4/MATH-500"
    assert written["reward_model"]["ground_truth"] == "2"
    assert (written["extra_info"]["level"], written["extra_info"]["subject"]) == ("1", "Prealgebra")


def test_folders_of_subjects_are_used_only_when_all_subjects_are_not_in_one_place(run, tmp_path):
    folder = tmp_path / "MATH-lighteval"
    for subject in ("algebra", "geometry"):
        for split in ("train", "test"):
            write_rows(folder / subject / f"{split}-00000-of-00001.parquet", [row(f"{subject} {split}")])
    files = run("math", folder)
    assert [r["extra_info"]["question"] for r in files["train.parquet"]] == ["algebra train", "geometry train"]
    assert [r["extra_info"]["index"] for r in files["train.parquet"]] == [0, 1]
    write_rows(folder / "data/train-00000-of-00001.parquet", [row("all train")])
    write_rows(folder / "data/test-00000-of-00001.parquet", [row("all test")])
    assert [r["extra_info"]["question"] for r in run("math", folder)["train.parquet"]] == ["all train"]
    assert [r["extra_info"]["question"] for r in run("math", folder / "algebra")["test.parquet"]] == ["algebra test"]


def test_the_original_layout_has_one_object_a_file(run, tmp_path):
    for split in ("train", "test"):
        for subject in ("algebra", "geometry"):
            path = tmp_path / "MATH" / split / subject / "1.json"
            path.parent.mkdir(parents=True)
            path.write_text(json.dumps(row(f"{subject} {split}"), indent=4))
    files = run("math", tmp_path / "MATH")
    assert [r["extra_info"]["question"] for r in files["test.parquet"]] == ["algebra test", "geometry test"]
    assert files["test.parquet"][0]["data_source"] == "DigitalLearningGmbH/MATH-lighteval"
    assert len(files["train.parquet"]) == 2
