import json

import pytest

from lockstep.tools.evaluate.questions import Question, find_contaminated, num_too_short, training_texts

WORDS = [
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
    "thirteen",
    "fourteen",
    "fifteen",
]
INSTRUCTION = "Reason step by step and end with the final answer on a line of its own in the form asked for"


def question(text, source="s"):
    return Question(source, text, text, False, {})


def test_thirteen_words_in_a_row_are_found_and_twelve_are_not():
    asked = [question(" ".join(WORDS)), question("a b c d e f g h i j k l m n")]
    assert find_contaminated(asked, ["before " + " ".join(WORDS[1:14]) + " after"]) == {0}
    assert find_contaminated(asked, ["before " + " ".join(WORDS[1:13]) + " after"]) == set()


def test_case_and_punctuation_do_not_hide_a_question():
    assert find_contaminated([question(" ".join(WORDS))], [", ".join(WORDS).upper() + "!"]) == {0}


def test_a_short_question_is_looked_for_as_a_whole_and_a_very_short_one_cannot_be_told():
    asked = [question("what is nine times nine"), question("why not")]
    assert find_contaminated(asked, ["So: What is nine times nine? Why not 81?"]) == {0}
    assert num_too_short(asked) == 1


def test_an_instruction_that_all_questions_share_is_no_overlap():
    asked = [
        question(f"{text} {INSTRUCTION}") for text in ("how many paper clips are there in this box", "who ate the last cake of all")
    ]
    trained = [f"a wholly different riddle about paper clips that were lost here {INSTRUCTION}"]
    assert find_contaminated(asked, trained) == set()
    assert find_contaminated(asked, [f"how many paper clips are there in this box {INSTRUCTION}"]) == {0}


@pytest.mark.parametrize("row", [{"prompt": [{"role": "user", "content": "hello there"}]}, {"text": "hello there"}])
def test_all_texts_of_a_row_are_read(tmp_path, row):
    (tmp_path / "train.jsonl").write_text(json.dumps(row | {"extra_info": {"answer": "yes", "n": 3}}))
    (text,) = training_texts(str(tmp_path / "train.jsonl"))
    assert "hello there" in text
    assert "yes" in text
