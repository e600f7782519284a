from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers.rows import write_rows

from lockstep.data.preprocess.hellaswag import RECIPE, convert
from lockstep.data.preprocess.recipe import UnusableRow

SHARED = Path(__file__).parents[4] / "shared/data"


def row(label: Any = 2) -> dict[str, Any]:
    return {
        "ind": 1,
        "activity_label": "Tennis",
        "ctx_a": "A man stands on a court.",
        "ctx_b": "the man",
        "ctx": "A man stands on a court. the man",
        "endings": ["runs.", "sits.", "serves the ball.", "eats."],
        "label": label,
        "source_id": "activitynet~v_1",
    }


@pytest.mark.parametrize("label", [2, "2"])
def test_the_letter_of_the_label_is_the_ground_truth_in_both_forms(label):
    example = convert(row(label), RECIPE.instruction)
    assert example.columns["reward_model"] == {"style": "rule", "ground_truth": "C"}
    assert example.prompt == [
        {
            "role": "user",
            "content": "Tennis: A man stands on a court. The man ...\n\nA. runs.\nB. sits.\nC. serves the ball.\nD. eats.\n\n"
            + RECIPE.instruction,
        }
    ]
    assert "Answer: X" in RECIPE.instruction


def test_tags_of_wikihow_become_sentences():
    example = convert(
        row()
        | {
            "ctx_a": "",
            "ctx_b": "",
            "ctx": "[header] How to rest [title] Lie down. [step] Close your eyes",
            "activity_label": "Home",
        },
        RECIPE.instruction,
    )
    assert example.prompt[0]["content"].startswith("Home: How to rest. Lie down. Close your eyes ...")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"label": ""}, "no label"),
        ({"label": None}, "no label"),
        ({"label": 4}, "the label is not one of 0, 1, 2, 3"),
        ({"label": True}, "the label is not one of 0, 1, 2, 3"),
        ({"label": "C"}, "the label is not one of 0, 1, 2, 3"),
        ({"endings": ["one", "two"]}, "endings is not a list of 4 texts"),
        ({"endings": ["one", "two", "three", None]}, "endings is not a list of 4 texts"),
        ({"ctx_b": "", "ctx": None}, "ctx is empty"),
    ],
)
def test_a_row_without_label_endings_or_text_says_why(changes, reason):
    with pytest.raises(UnusableRow) as error:
        convert(row() | changes, RECIPE.instruction)
    assert str(error.value) == reason


def test_validation_is_held_out_and_a_test_split_without_labels_is_named(run, refuse, tmp_path):
    unlabelled = {key: value for key, value in row().items() if key != "label"}
    for split, rows in (("train", [row("0"), row("")]), ("validation", [row("1")]), ("test", [unlabelled, row("")])):
        write_rows(tmp_path / f"hub/data/{split}-00000-of-00001.parquet", rows)
    files = run("hellaswag", tmp_path / "hub")
    assert [r["reward_model"]["ground_truth"] for r in files["test.parquet"]] == ["B"]
    assert files["test.parquet"][0]["extra_info"]["split"] == "validation"
    assert len(files["train.parquet"]) == 1
    assert "train: rows that cannot be used: 1\n" in run.out
    assert "not used: split test" in run.out
    for path in (tmp_path / "out").iterdir():
        path.unlink()
    error = refuse("hellaswag", tmp_path / "hub/data/test-00000-of-00001.parquet")
    assert "no row of the split 'test' can be used" in error
    assert "2  no label" in error


@pytest.mark.skipif(not SHARED.is_dir(), reason="the shared data folder is not here")
def test_every_real_row_is_usable_and_both_forms_agree(run):
    files = run("hellaswag", SHARED / "hellaswag")
    assert {name: len(rows) for name, rows in files.items()} == {"train.parquet": 500, "test.parquet": 500}
    assert not any("[" in r["prompt"][0]["content"] for r in files["train.parquet"] + files["test.parquet"])
    hub = run("hellaswag", *(SHARED / "hf_parquet_samples").glob("Rowan*"))
    assert hub == {name: rows[:50] for name, rows in files.items()}
