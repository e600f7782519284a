"""Two results are compared only where the same judge gave their scores."""

import functools
import json

import pytest

from lockstep.errors import ConfigError, DataError
from lockstep.rewards.manager import RewardManager
from lockstep.tools.evaluate.against import check_against, judges_of
from lockstep.tools.evaluate.question import Question, digest
from lockstep.tools.evaluate.results import question_entries
from lockstep.tools.evaluate.scoring import Texts
from lockstep.utils.files import load_object

CODE = "def compute_score(solution_str, bonus=0.0):\n    return bonus\n\ndef short(solution_str):\n    return 1.0\n"
SANDBOX = {"wall_s": 10.0}


def asked(count=3):
    return [Question("s", f"question {i}", f"question {i}", False, {"data_source": "s"}) for i in range(count)]


@pytest.fixture
def judged(tmp_path):
    """`judged(file, code, kwargs)`: who judges each question with this function."""

    def judge(file="reward.py", code=CODE, weights=None, name="compute_score", **kwargs):
        path = tmp_path / digest([file, code]) / file
        path.parent.mkdir(exist_ok=True)
        path.write_text(code)
        function = functools.partial(load_object(str(path), name), **kwargs)
        return judges_of(asked(), RewardManager(Texts(0), 0, compute_score=function, weights=weights), SANDBOX)

    return judge


def result(judges, **parts):
    entries = question_entries(asked(), [], judges)
    return json.loads(json.dumps({"questions": entries, "judges": {digest(judge): judge for judge in judges}} | parts))


def test_the_same_judge_is_found_wherever_its_file_is(judged):
    assert check_against(result(judged(bonus=1.0)), asked(), judged(bonus=1.0), {}, {}) == []
    assert check_against(result(judged()), asked(), judged("other_name.py"), {}, {}) == []
    assert judged()[0] == {
        "rule": {"weight": 1.0, "function": "reward.py:compute_score", "settings": {}, "code": digest(CODE.encode())}
    }


@pytest.mark.parametrize(
    ("now", "message"),
    [
        (
            {"file": "b.py", "code": CODE + "\n"},
            "3 of 3 questions had another judge: reward.py:compute_score before, b.py:compute_score",
        ),
        ({"name": "short"}, "reward.py:compute_score before, reward.py:short now"),
        ({"bonus": 2.0}, r"reward.py:compute_score before, reward.py:compute_score\(bonus=2.0\) now"),
        ({"weights": {"*": {"rule": 0.5}}}, "before, 0.5 x reward.py:compute_score now"),
    ],
)
def test_another_judge_is_an_error(judged, now, message):
    with pytest.raises(ConfigError, match=message):
        check_against(result(judged()), asked(), judged(**now), {}, {})


def test_what_may_be_what_is_compared_is_said(judged):
    earlier = result(judged(), template={"form": "plain", "hash": "1"}, sampling={"temperature": 0.0, "stop": [], "seed": 0})
    drawing = {"temperature": 0.7, "stop": (), "seed": 1}
    found = check_against(earlier, asked(), judged(code=CODE + "# a comment\n"), {"form": "chat", "hash": "2"}, drawing)
    assert found == [
        "the code of reward.py:compute_score, which judged 3 of 3 questions",
        "form 'plain' before, 'chat' now",
        "temperature 0.0 before, 0.7 now",
    ]


def test_an_older_result_does_not_say_who_judged(judged):
    earlier = {"questions": question_entries(asked(), [])}
    assert check_against(earlier, asked(), judged(), {}, {}) == ["the earlier result does not say who judged 3 of 3 questions"]
    assert check_against(earlier, asked(), [], {}, {}) == [], "a choice has no judge"


def test_a_result_without_two_of_the_questions_is_an_error(judged):
    earlier = {"questions": question_entries(asked(1), [])}
    with pytest.raises(DataError, match="1 of the 3 questions are in the earlier result"):
        check_against(earlier, asked(), judged(), {}, {})


def test_what_is_secret_among_a_judges_arguments_is_not_written(judged, tmp_path):
    judges = judged(code="def compute_score(solution_str, api_key):\n    return 0.0\n", api_key="sk-1234")
    assert "sk-1234" not in json.dumps(judges)
