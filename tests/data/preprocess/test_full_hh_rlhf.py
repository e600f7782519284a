from __future__ import annotations

from pathlib import Path

import pytest
from helpers.rows import write_rows

from lockstep.data.preprocess.full_hh_rlhf import RECIPES, parse_dialogue
from lockstep.data.preprocess.recipe import UnusableRow

SHARED = Path(__file__).parents[4] / "shared/data"
BEFORE = "\n\nHuman: Hello?\n\nAssistant: Hi.\n\nHuman: Why: is it\n\nso?\n\nAssistant:"
MESSAGES = [
    {"role": "user", "content": "Hello?"},
    {"role": "assistant", "content": "Hi."},
    {"role": "user", "content": "Why: is it\n\nso?"},
]
DAHOAS = {"prompt": BEFORE, "response": " Because.", "chosen": " Because.", "rejected": " No."}
ANTHROPIC = {"chosen": BEFORE + " Because.", "rejected": BEFORE + " No."}
ULTRAFEEDBACK = {
    "prompt": "Why: is it\n\nso?",
    "chosen": [*MESSAGES, {"role": "assistant", "content": "Because."}],
    "rejected": [*MESSAGES, {"role": "assistant", "content": "No."}],
    "score_chosen": 8.0,
}


@pytest.mark.parametrize("row", [DAHOAS, ANTHROPIC, ULTRAFEEDBACK], ids=["Dahoas", "Anthropic", "UltraFeedback"])
@pytest.mark.parametrize(
    ("split", "columns"),
    [
        ("rl", {"reward_model": {"style": "model", "ground_truth": "Because."}}),
        ("sft", {"response": "Because."}),
        ("rm", {"chosen": "Because.", "rejected": "No."}),
    ],
)
def test_all_layouts_become_messages_in_every_form(run, tmp_path, row, split, columns):
    for name in ("train", "test"):
        write_rows(tmp_path / f"hh/helpful-base/{name}.jsonl.gz", [row])
    files = run("full_hh_rlhf", tmp_path / "hh", options=("--split", split))
    assert sorted(files) == ["test.parquet", "train.parquet"]
    assert files["test.parquet"] == [
        {
            "data_source": "Dahoas/full-hh-rlhf",
            "prompt": MESSAGES,
            "ability": "alignment",
            **columns,
            "extra_info": {"split": "test", "index": 0},
        }
    ]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (DAHOAS | {"prompt": "Hello?\n\nAssistant:"}, "the dialogue does not begin with 'Human:'"),
        (DAHOAS | {"prompt": "\n\nAssistant: Hi.\n\nHuman: Hello?\n\nAssistant:"}, "the dialogue does not begin with 'Human:'"),
        (DAHOAS | {"prompt": "\n\nHuman: a\n\nHuman: b\n\nAssistant:"}, "Human and Assistant do not take turns"),
        (DAHOAS | {"prompt": "\n\nHuman:\n\nAssistant:"}, "a turn of the dialogue is empty"),
        (DAHOAS | {"prompt": "\n\nHuman: a"}, "the prompt does not end with 'Assistant:'"),
        (DAHOAS | {"prompt": "\n\nHuman: a\n\nAssistant: b"}, "the prompt does not end with 'Assistant:'"),
        (DAHOAS | {"chosen": " a\n\nHuman: b"}, "chosen has a turn of another speaker in it"),
        (DAHOAS | {"rejected": " "}, "rejected is empty"),
        (DAHOAS | {"rejected": "Because. "}, "chosen and rejected are the same"),
        (ANTHROPIC | {"chosen": "\n\nHuman: a"}, "chosen does not end with an answer"),
        (ANTHROPIC | {"rejected": "\n\nHuman: b\n\nAssistant: No."}, "chosen and rejected answer different dialogues"),
        ({"chosen": ANTHROPIC["chosen"]}, "no column 'rejected'"),
    ],
)
def test_a_dialogue_that_is_none_says_why(row, reason):
    with pytest.raises(UnusableRow) as error:
        RECIPES["rm"].convert(row, "")
    assert str(error.value) == reason


def test_a_dialogue_keeps_every_word():
    assert parse_dialogue(BEFORE) == [*MESSAGES, {"role": "assistant", "content": ""}]


@pytest.mark.skipif(not SHARED.is_dir(), reason="the shared data folder is not here")
def test_real_rows_are_usable_but_for_those_that_are_shown(run):
    files = run("full_hh_rlhf", SHARED / "hh_rlhf")
    assert {name: len(rows) for name, rows in files.items()} == {"train.parquet": 498, "test.parquet": 200}
    assert "response has a turn of another speaker in it" in run.out
    assert "Human and Assistant do not take turns" in run.out
    for row in files["train.parquet"]:
        roles = [message["role"] for message in row["prompt"]]
        assert roles == [("user", "assistant")[i % 2] for i in range(len(roles))]
        assert roles[-1] == "user"
    pairs = run("full_hh_rlhf", SHARED / "hh_rlhf/helpful_pairs_sample.jsonl", options=("--split", "rm"))
    assert len(pairs["train.parquet"]) == 100
    hub = run("full_hh_rlhf", SHARED / "hf_parquet_samples/Dahoas_full-hh-rlhf.train.parquet")
    assert hub["train.parquet"] == files["train.parquet"][:49]


def test_ultrafeedbacks_files_of_preferences_are_used_and_the_others_named(run, tmp_path):
    for name in ("train_prefs", "train_sft", "test_prefs", "test_gen"):
        write_rows(tmp_path / f"uf/data/{name}-00000-of-00001.parquet", [ULTRAFEEDBACK])
    files = run("ultrafeedback", tmp_path / "uf", options=("--split", "rm"))
    for name in ("train.parquet", "test.parquet"):
        assert [(row["data_source"], row["chosen"]) for row in files[name]] == [
            ("HuggingFaceH4/ultrafeedback_binarized", "Because.")
        ]
    assert "not used: uf/data/test_gen-00000-of-00001.parquet, uf/data/train_sft-00000-of-00001.parquet" in run.out


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"chosen": MESSAGES}, "chosen is not a dialogue that ends with an answer"),
        ({"chosen": []}, "no column 'role'"),
        ({"rejected": [{"role": "assistant", "content": "No."}]}, "rejected is not a dialogue"),
        ({"rejected": ULTRAFEEDBACK["chosen"]}, "chosen and rejected are the same"),
    ],
)
def test_messages_that_are_no_preference_say_why(changes, reason):
    with pytest.raises(UnusableRow, match=reason):
        RECIPES["rm"].convert(ULTRAFEEDBACK | changes, "")
