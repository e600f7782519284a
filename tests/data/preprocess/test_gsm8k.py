from __future__ import annotations

from pathlib import Path

import pytest
from helpers.rows import write_rows

from lockstep.data.preprocess.gsm8k import RECIPE, convert
from lockstep.data.preprocess.recipe import UnusableRow
from lockstep.rewards.graders import default_compute_score

SHARED = Path(__file__).parents[4] / "shared/data"


def row(number: str = "72") -> dict[str, str]:
    return {"question": "How many?", "answer": f"She has 70 + 2 = <<70+2=72>>72.\n#### {number}"}


@pytest.mark.parametrize(
    ("number", "truth"), [("72", "72"), ("1,234,567", "1234567"), ("-5", "-5"), ("2.5", "2.5"), ("$7", "7"), ("10 ", "10")]
)
def test_the_number_after_the_hashes_is_the_ground_truth_and_the_answer_scores_full(number, truth):
    example = convert(row(number), RECIPE.instruction)
    response = f"She has 70 + 2 = 72.\n#### {number}"
    assert example.columns == {"reward_model": {"style": "rule", "ground_truth": truth}, "response": response}
    for answer in (response, example.extra_info["answer"]):
        assert default_compute_score("openai/gsm8k", answer, truth) == 1.0


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"answer": "It is 72."}, "the answer has no '####'"),
        ({"answer": "#### seventy-two"}, "no number after '####' at the end of the answer"),
        ({"answer": "#### 72\nor so"}, "no number after '####' at the end of the answer"),
        ({"answer": None}, "answer is empty"),
        ({"question": "  "}, "question is empty"),
        ({"question": 3}, "question is int, not text"),
    ],
)
def test_a_row_without_question_or_number_says_why(changes, reason):
    with pytest.raises(UnusableRow) as error:
        convert(row() | changes, RECIPE.instruction)
    assert str(error.value) == reason


def test_the_hub_layout_takes_the_main_configuration(run, tmp_path):
    for config, question in (("main", "plain"), ("socratic", "with hints")):
        for split in ("train", "test"):
            path = tmp_path / "hub" / config / f"{split}-00000-of-00001.parquet"
            write_rows(path, [row() | {"question": f"{question} {split}"}])
    files = run("gsm8k", tmp_path / "hub")
    assert {name: [r["extra_info"]["question"] for r in rows] for name, rows in files.items()} == {
        "test.parquet": ["plain test"],
        "train.parquet": ["plain train"],
    }
    assert "not used: hub/socratic/test-00000-of-00001.parquet" in run.out
    assert files["train.parquet"][0] == {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": f"plain train\n\n{RECIPE.instruction}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "72"},
        "response": "She has 70 + 2 = 72.\n#### 72",
        "extra_info": {"split": "train", "index": 0, "question": "plain train", "answer": row()["answer"]},
    }
    only = run("gsm8k", tmp_path / "hub/socratic")
    assert only["train.parquet"][0]["extra_info"]["question"] == "with hints train"


def test_the_github_layout_takes_the_plain_files(run, tmp_path):
    for name in ("train", "test", "train_socratic", "test_socratic", "example_model_solutions"):
        write_rows(tmp_path / "github" / f"{name}.jsonl", [row() | {"question": name}])
    files = run("gsm8k", tmp_path / "github")
    assert [files[name][0]["extra_info"]["question"] for name in files] == ["test", "train"]


def test_an_instruction_of_ones_own_replaces_ours(run, tmp_path):
    path = write_rows(tmp_path / "train.jsonl", [row()])
    assert run("gsm8k", path, options=("--instruction", "Be brief."))["train.parquet"][0]["prompt"][0]["content"] == (
        "How many?\n\nBe brief."
    )
    assert run("gsm8k", path, options=("--instruction", ""))["train.parquet"][0]["prompt"][0]["content"] == "How many?"


@pytest.mark.skipif(not SHARED.is_dir(), reason="the shared data folder is not here")
def test_every_real_row_is_usable_and_its_own_answer_scores_full(run):
    files = run("gsm8k", SHARED / "gsm8k")
    assert {name: len(rows) for name, rows in files.items()} == {"train.parquet": 7473, "test.parquet": 1319}
    for example in files["test.parquet"]:
        assert (
            default_compute_score("openai/gsm8k", example["extra_info"]["answer"], example["reward_model"]["ground_truth"]) == 1.0
        )
    sample = run("gsm8k", SHARED / "hf_parquet_samples/openai_gsm8k.main.train.parquet")
    assert sample["train.parquet"] == files["train.parquet"][:50]
