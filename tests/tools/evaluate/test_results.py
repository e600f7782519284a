"""What samples come to, and what may be compared with an earlier result."""

import functools
import json

import pytest

from lockstep.errors import ConfigError, DataError
from lockstep.observability.statistics import mcnemar, wilson_interval
from lockstep.rewards.manager import RewardManager
from lockstep.tools.evaluate.questions import Question, Sample, digest
from lockstep.tools.evaluate.results import (
    check_against,
    compare_with,
    judges_of,
    mean_scores,
    question_entries,
    read_results,
    summarise,
)
from lockstep.tools.evaluate.scoring import Texts
from lockstep.utils.files import load_object


def asked(count, source="s"):
    return [Question(source, f"question {i}", f"question {i}", False, {"reward_model": {"ground_truth": i}}) for i in range(count)]


def answered(scores, name="strict", preds=None):
    """Samples with these scores, one list per question."""
    return [
        Sample(i, k, scores={name: float(score)}, preds={name: preds[i][k]} if preds and preds[i][k] else {})
        for i, group in enumerate(scores)
        for k, score in enumerate(group)
    ]


def test_one_sample_per_question_has_wilsons_interval():
    found = summarise(asked(3), answered([[1], [0], [1]]), ["strict"])["s"]
    low, high = wilson_interval(2, 3)
    assert found["scores"] == {"strict": {"mean@1": {"value": pytest.approx(2 / 3), "low": low, "high": high}}}
    assert (found["num_questions"], found["num_samples"], found["num_missing"]) == (3, 3, 0)


def test_several_samples_have_pass_and_majority():
    preds = [["4", "4", "5", None], [None, "7", None, None]]
    scores = summarise(asked(2), answered([[1, 1, 0, 0], [0, 1, 0, 0]], preds=preds), ["strict"])["s"]["scores"]["strict"]
    assert {name: number["value"] for name, number in scores.items()} == pytest.approx(
        {
            "mean@4": 3 / 8,
            "pass@2": ((1 - 1 / 6) + (1 - 3 / 6)) / 2,
            "pass@4": 1.0,
            # Of the six pairs, five of the first question begin with 4, and two of the second with 7.
            "majority@2": (5 / 6 + 2 / 6) / 2,
            # Nobody agrees on the second question, so the first counts, which has no answer.
            "majority@4": (1.0 + 0.0) / 2,
        }
    )


def test_scores_that_are_more_than_right_and_wrong_are_called_best():
    scores = summarise(asked(2), answered([[0.5, 1], [0, 0.2]], "reward"), None)["s"]["scores"]["reward"]
    assert set(scores) == {"mean@2", "best@2"}


def test_a_sample_without_a_score_is_in_no_number_and_counted():
    samples = answered([[1], [0], [0]])
    samples[2].failure, samples[2].scores = "timeout", {}
    found = summarise(asked(3), samples, ["strict"])["s"]
    assert found["scores"]["strict"]["mean@1"]["value"] == 0.5
    assert found["num_missing"] == 1
    for sample in samples:
        sample.failure = "the server is gone"
    with pytest.raises(DataError, match="no answer has a score; the first: the server is gone"):
        summarise(asked(3), samples, ["strict"])


def test_cut_answers_and_lost_forms_are_shares():
    samples = answered([[1], [0]])
    samples[0].finish_reason = "length"
    for sample in samples:
        sample.scores["formatted"] = sample.scores["strict"]
    found = summarise(asked(2), samples, ["strict"])["s"]
    assert (found["cut_by_length"]["value"], found["format_failures"]["value"]) == (0.5, 0.5)
    assert "format_failures" not in summarise(asked(2), answered([[1], [0]]), ["strict"])["s"]


def test_sources_are_apart_and_acc_is_the_number_where_the_reward_gives_one():
    questions = asked(1, "a") + asked(1, "b")
    samples = [Sample(0, 0, scores={"reward": 0.1, "acc": 1.0}), Sample(1, 0, scores={"reward": 0.2})]
    found = summarise(questions, samples, None)
    assert [list(part["scores"]) for part in found.values()] == [["acc"], ["reward"]]


def test_a_comparison_matches_questions_by_what_they_ask(tmp_path):
    questions = asked(6)
    old = question_entries(questions, answered([[0], [0], [0], [1], [1], [0]]))
    (tmp_path / "results.json").write_text(json.dumps({"questions": old[::-1]}))
    earlier = read_results(tmp_path)
    new = answered([[1], [1], [0], [1], [0]])
    results = summarise(questions[:5], new, ["strict"])
    found = compare_with(questions[:5], new, results, earlier)["s"]["strict"]
    assert (found["num_questions"], found["num_better"], found["num_worse"]) == (5, 2, 1)
    assert found["value"] == pytest.approx(0.2)
    assert found["p_value"] == mcnemar(2, 1)


def test_a_question_that_stands_twice_is_compared_twice():
    questions = asked(2) * 2
    samples = answered([[1], [0], [0], [0]])
    found = compare_with(
        questions, samples, summarise(questions, samples, ["strict"]), {"questions": question_entries(questions, samples)}
    )
    assert (found["s"]["strict"]["num_questions"], found["s"]["strict"]["value"]) == (4, 0.0)


def test_results_of_other_questions_and_files_that_are_none_are_errors(tmp_path):
    samples = answered([[1], [0]])
    other = {"questions": question_entries(asked(2, "other"), samples)}
    with pytest.raises(DataError, match="no question with a score that this one has"):
        compare_with(asked(2), samples, summarise(asked(2), samples, ["strict"]), other)
    (tmp_path / "results.json").write_text('{"questions": [1]}')
    with pytest.raises(DataError, match="is not a result file"):
        read_results(tmp_path / "results.json")


def test_the_mean_without_some_questions():
    samples = answered([[1], [0], [0]])
    found = mean_scores(asked(3), samples, summarise(asked(3), samples, ["strict"]), {0})
    assert found["s"]["strict"]["value"] == 0.0


CODE = "def compute_score(solution_str, bonus=0.0):\n    return bonus\n\ndef short(solution_str):\n    return 1.0\n"
SANDBOX = {"wall_s": 10.0}


def judged_questions(count=3):
    return [Question("s", f"question {i}", f"question {i}", False, {"data_source": "s"}) for i in range(count)]


@pytest.fixture
def judged(tmp_path):
    """`judged(file, code, kwargs)`: who judges each question with this function."""

    def judge(file="reward.py", code=CODE, weights=None, name="compute_score", **kwargs):
        path = tmp_path / digest([file, code]) / file
        path.parent.mkdir(exist_ok=True)
        path.write_text(code)
        function = functools.partial(load_object(str(path), name), **kwargs)
        return judges_of(judged_questions(), RewardManager(Texts(0), 0, compute_score=function, weights=weights), SANDBOX)

    return judge


def result(judges, **parts):
    entries = question_entries(judged_questions(), [], judges)
    return json.loads(json.dumps({"questions": entries, "judges": {digest(judge): judge for judge in judges}} | parts))


def test_the_same_judge_is_found_wherever_its_file_is(judged):
    assert check_against(result(judged(bonus=1.0)), judged_questions(), judged(bonus=1.0), {}, {}) == []
    assert check_against(result(judged()), judged_questions(), judged("other_name.py"), {}, {}) == []
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
        check_against(result(judged()), judged_questions(), judged(**now), {}, {})


def test_what_may_be_what_is_compared_is_said(judged):
    earlier = result(judged(), template={"form": "plain", "hash": "1"}, sampling={"temperature": 0.0, "stop": [], "seed": 0})
    drawing = {"temperature": 0.7, "stop": (), "seed": 1}
    found = check_against(earlier, judged_questions(), judged(code=CODE + "# a comment\n"), {"form": "chat", "hash": "2"}, drawing)
    assert found == [
        "the code of reward.py:compute_score, which judged 3 of 3 questions",
        "form 'plain' before, 'chat' now",
        "temperature 0.0 before, 0.7 now",
    ]


def test_an_older_result_does_not_say_who_judged(judged):
    earlier = {"questions": question_entries(judged_questions(), [])}
    assert check_against(earlier, judged_questions(), judged(), {}, {}) == [
        "the earlier result does not say who judged 3 of 3 questions"
    ]
    assert check_against(earlier, judged_questions(), [], {}, {}) == [], "a choice has no judge"


def test_a_result_without_two_of_the_questions_is_an_error(judged):
    earlier = {"questions": question_entries(judged_questions(1), [])}
    with pytest.raises(DataError, match="1 of the 3 questions are in the earlier result"):
        check_against(earlier, judged_questions(), judged(), {}, {})


def test_what_is_secret_among_a_judges_arguments_is_not_written(judged, tmp_path):
    judges = judged(code="def compute_score(solution_str, api_key):\n    return 0.0\n", api_key="sk-1234")
    assert "sk-1234" not in json.dumps(judges)
