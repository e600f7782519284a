import io
import json

import pytest
from rich.console import Console

from lockstep.errors import DataError, MissingExtra
from lockstep.tools.evaluate.command import TASK_NAMES
from lockstep.tools.evaluate.results import print_table, source_rows
from lockstep.tools.evaluate.tasks import TASKS, load_task

GSM8K = [{"question": f"What is {i} + 1?", "answer": f"It is <<{i}+1={i + 1}>>{i + 1}.\n#### {i + 1}"} for i in range(6)]
HELLASWAG = {
    "activity_label": "Baking",
    "ctx_a": "A cook stands in a kitchen.",
    "ctx_b": "the cook",
    "ctx": "A cook stands in a kitchen. the cook",
    "endings": ["stirs. [substeps] Slowly.", "flies away.", "is a [title] fish.", "sings."],
    "label": 2,
}
HUMANEVAL = {
    "task_id": "HumanEval/0",
    "prompt": "def one():\n",
    "canonical_solution": "    return 1\n",
    "test": "def check(c):\n    assert c() == 1\n",
    "entry_point": "one",
}
MATH = {"problem": "What is 1+1?", "solution": r"It is \boxed{2}.", "level": "Level 1", "type": "Algebra"}


def mbpp(number):
    return {
        "task_id": number,
        "text": f"Write f{number}.",
        "code": f"def f{number}(): pass",
        "test_list": [f"assert f{number}() is None"],
    }


@pytest.fixture
def source(tmp_path):
    """`source(name=rows, ...)`: a folder with a file of rows for each name."""

    def write(**files):
        for name, rows in files.items():
            (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
        return [str(tmp_path)]

    return write


def test_a_chat_asks_as_preprocessing_does_and_examples_are_turns(source):
    questions, template, _ = load_task("gsm8k", source(train=GSM8K, test=GSM8K[:2]), "chat", 2, None)
    first = questions[0]
    assert [turn["role"] for turn in first.prompt] == ["user", "assistant", "user", "assistant", "user"]
    assert first.prompt[-1]["content"].startswith("What is 0 + 1?\n\nReason step by step")
    assert "<<" not in first.prompt[1]["content"]
    assert first.columns["reward_model"]["ground_truth"] == "1"
    assert (template["form"], template["num_shots"], template["stop"]) == ("chat", 2, [])
    assert "Strict: the number after the last" in template["extraction"]
    assert len(questions) == 2


def test_a_plain_question_follows_five_examples_and_ends_where_the_next_would_begin(source):
    questions, template, _ = load_task("gsm8k", source(train=GSM8K, test=GSM8K[5:]), "plain", None, None)
    prompt = questions[0].prompt
    assert prompt.count("Question: ") == 6
    assert prompt.endswith("Question: What is 5 + 1?\nAnswer:")
    assert (template["num_shots"], template["stop"], questions[0].is_plain) == (5, ["Question:"], True)


def test_the_hash_of_a_template_changes_with_all_that_a_model_is_asked_and_a_questions_does_not(source):
    found = source(train=GSM8K, test=GSM8K[:1])
    asked = {(form, shots): load_task("gsm8k", found, form, shots, None) for form in ("chat", "plain") for shots in (0, 1)}
    assert len({template["hash"] for _, template, _ in asked.values()}) == 4
    assert len({questions[0].hash for questions, _, _ in asked.values()}) == 1
    assert load_task("gsm8k", found, "chat", 0, None)[1] == asked["chat", 0][1]
    other = load_task("gsm8k", source(train=GSM8K[1:], test=GSM8K[:1]), "chat", 1, None)
    assert other[1]["hash"] != asked["chat", 1][1]["hash"], "other examples"


def test_hellaswag_is_four_continuations_cut_as_the_harness_cuts_them(source):
    questions, template, _ = load_task("hellaswag", source(val=[HELLASWAG]), "chat", None, None)
    assert questions[0].prompt == "Baking: A cook stands in a kitchen. The cook"
    assert questions[0].choices == (" stirs. Slowly.", " flies away.", " is a. fish.", " sings.")
    assert questions[0].columns["extra_info"]["label"] == 2
    assert template["form"] == "plain"


def test_code_is_asked_as_a_head_to_continue_and_mbpp_by_the_authors_numbers(source):
    heads, _, _ = load_task("humaneval", source(humaneval=[HUMANEVAL]), "plain", None, None)
    assert (heads[0].prompt, heads[0].columns["extra_info"]["is_plain"]) == ("def one():\n", True)
    (file,) = source(mbpp=[mbpp(number) for number in (1, 11, 12, 601, 602, 603)])
    rows, template, _ = load_task("mbpp", [f"{file}/mbpp.jsonl"], "plain", None, None)
    assert [row.columns["extra_info"]["task_id"] for row in rows] == [11, 12]
    assert template["num_shots"] == 3
    assert rows[0].prompt.count("[DONE]") == 3
    assert rows[0].prompt.endswith("Write f11. Your code should pass these tests:\n\nassert f11() is None\n[BEGIN]\n")


def test_mathematics_is_asked_for_a_box(source):
    questions, _, _ = load_task("math", source(test=[MATH]), "chat", None, None)
    assert questions[0].prompt[0]["content"].endswith(r"inside \boxed{}.")


def test_a_task_that_cannot_be_judged_here_is_said_at_once(source, monkeypatch):
    monkeypatch.setattr("lockstep.judging.math._has_math_verify", lambda: False)
    with pytest.raises(MissingExtra, match="math-verify"):
        load_task("math", source(test=[MATH]), "chat", None, None)


def test_the_first_questions_only(source):
    assert len(load_task("gsm8k", source(test=GSM8K), "chat", None, 4)[0]) == 4


def test_rows_that_cannot_be_used_are_counted_with_their_reasons(source):
    rows = [
        GSM8K[0],
        {"question": None, "answer": "#### 1"},
        GSM8K[1],
        {"answer": "#### 2"},
        {"question": None, "answer": "#### 3"},
        GSM8K[2],
    ]
    (folder,) = source(test=rows)
    with open(f"{folder}/test.jsonl", "a") as file:
        file.write("\nno JSON\n")
    questions, _, account = load_task("gsm8k", [folder], "chat", 0, None)
    assert (len(questions), account.num_read, account.num_written) == (3, 7, 3)
    assert {reason: count for reason, (count, _) in account.unusable.items()} == {
        "question is empty": 2,
        "no column 'question'": 1,
        "not JSON": 1,
    }
    assert account.unusable["question is empty"][1].startswith("test.jsonl row 1: ")
    _, _, account = load_task("gsm8k", [folder], "chat", 0, 2)
    assert account.num_read == 3, "no more is read than is asked"
    printed = io.StringIO()
    print_table({"results": {}, "source_rows": source_rows(account)}, Console(file=printed))
    assert (
        "1 of 3 rows cannot be used and are in no number\n  1: question is empty; the first: test.jsonl row 1" in printed.getvalue()
    )


@pytest.mark.parametrize(
    ("files", "shots", "message"),
    [
        ({"test": GSM8K}, 2, "--shots 2: the source has 0 training rows"),
        ({"test": [{"prompt": [{"role": "user", "content": "hi"}]}]}, 0, "no column 'question'.*go to --data"),
    ],
)
def test_what_cannot_be_asked_is_an_error(source, files, shots, message):
    with pytest.raises(DataError, match=message):
        load_task("gsm8k", source(**files), "chat", shots, None)


def test_the_command_knows_the_tasks():
    assert tuple(TASKS) == TASK_NAMES
