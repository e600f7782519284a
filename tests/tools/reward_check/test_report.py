"""Each kind of problem is found and named, and nothing else is."""

import io
import json

import pytest
from rich.console import Console

from lockstep.rewards.outcome import Failure, Score
from lockstep.tools.reward_check.report import ERRORS, make_report, print_report
from lockstep.tools.reward_check.responses import AllowedScore, Response
from lockstep.tools.reward_check.trials import GOLD, SAMPLE, JudgedRow, Trial, TrialResult, TriedRow

EARNS = {
    GOLD: AllowedScore.MOST,
    "empty": AllowedScore.NOTHING,
    "two answers": AllowedScore.LESS_THAN_GOLD,
    "attack": AllowedScore.NO_ESCAPE,
}


def result(name, *outcomes, row=0, source="mine"):
    """A number is a score, a text the kind of a failure; one alone was the same twice."""
    outcomes = outcomes * 2 if len(outcomes) == 1 else outcomes
    item = {"data_source": source, "raw_prompt": "?", "index": row, "reward_model": {"ground_truth": "42"}}
    judged = JudgedRow(TriedRow.of("train", row, item), {"rule": 1.0}, False, "42")
    response = Response(name, f"text of {name} \ud800 [bold]", EARNS.get(name, AllowedScore.ANYTHING))
    told = tuple(Failure(o, f"it was {o}") if isinstance(o, str) else Score(o) for o in outcomes)
    return TrialResult(Trial(judged, response), told, (0.25, 0.75))


def report_of(*results, **more):
    return make_report(results, more.pop("escapes", []), timeout_s=30, **more)


def kinds(report):
    return [problem.kind for problem in report.problems]


GOOD = [result(GOLD, 1.0), result("empty", 0.0), result("two answers", 0.5), result("attack", 0.0), result("emoji", 1.0)]


def test_a_good_reward_is_clean():
    report = report_of(*GOOD)
    assert report.is_clean
    assert kinds(report) == []
    (source,) = report.sources
    assert (source.num_rows, source.num_gold_right, source.num_gold_wrong, source.gold_target) == (1, 1, 0, 1.0)
    assert (source.num_calls, source.mean_s, source.max_s) == (10, 0.5, 0.75)


@pytest.mark.parametrize(
    ("bad", "expected"),
    [
        (result("emoji", "raised"), ["raised"]),
        (result("emoji", "crashed"), ["crashed"]),
        (result("emoji", "timeout"), ["timeout"]),
        (result("emoji", "invalid"), ["invalid"]),
        (result("emoji", 0.0, 1.0), ["differs"]),
        (result("emoji", 0.0, "raised"), ["raised", "differs"]),
        (result(GOLD, 0.5, row=1), ["gold wrong"]),
        (result(GOLD, "raised", row=1), ["raised"]),
        (result("attack", 1.0, row=1), ["escape"]),
        (result("empty", 0.1, row=1), ["hack"]),
        (result("two answers", 1.0), ["hack"]),
        (result("two answers", 1.0, row=1), []),
    ],
)
def test_each_problem_is_named_with_an_example(bad, expected):
    report = report_of(*GOOD, bad)
    assert kinds(report) == expected
    assert report.is_clean == (not set(expected) & set(ERRORS))
    for problem in report.problems:
        assert problem.data_source == "mine"
        assert problem.by_response == {bad.trial.response.name: 1}
        assert problem.examples[0].response == bad.trial.response.text


def test_a_right_answer_must_earn_more_than_silence_or_what_the_user_says():
    nothing = [result(GOLD, 0.0), result("empty", 0.0)]
    assert kinds(report_of(*nothing)) == ["gold wrong"]
    assert kinds(report_of(result(GOLD, 0.0), result("empty", -1.0))) == []
    assert kinds(report_of(*nothing, gold_score=0.0)) == []
    assert kinds(report_of(result(GOLD, 0.9), result("empty", 0.0), gold_score=1.0)) == ["gold wrong"]
    mixed = [result(GOLD, 1.0), result(GOLD, 1.1, row=1)]
    assert (kinds(report_of(*mixed)), kinds(report_of(*mixed, gold_score=1.0))) == (["gold wrong"], [])


def test_sources_have_targets_of_their_own():
    report = report_of(result(GOLD, 1.0, source="one"), result(GOLD, 5.0, row=1, source="two"))
    assert kinds(report) == []
    assert [source.gold_target for source in report.sources] == [1.0, 5.0]


def test_groups_with_equal_scores_carry_no_signal():
    assert report_of(*GOOD).groups is None
    assert report_of(*GOOD, result(SAMPLE, 1.0)).groups is None
    samples = [result(SAMPLE, score, row=row) for row, scores in enumerate([(0, 1), (1, 1), (0, "raised")]) for score in scores]
    report = report_of(*samples)
    assert (report.groups.num_groups, report.groups.samples, report.groups.num_without_signal) == (3, 2, 2)
    assert report.groups.mean_score == pytest.approx(3 / 5)
    assert "no signal" not in kinds(report)
    assert kinds(report_of(*samples[2:4])) == ["no signal"]


def test_what_was_seen_outside_is_an_escape_and_what_was_not_asked_is_said():
    report = report_of(*GOOD, TrialResult(GOOD[0].trial, (), ()), escapes=["a file was written"])
    assert (kinds(report), report.problems[0].data_source) == (["escape"], None)
    assert report.notes == ["1 of 6 responses, after 16 time-outs"]


def test_examples_are_of_different_kinds_of_response():
    bad = [result(name, "raised", row=row) for name in ("emoji", "units") for row in range(5)]
    (problem,) = report_of(*bad).problems
    assert problem.by_response == {"emoji": 5, "units": 5}
    assert [example.response_kind for example in problem.examples] == ["emoji", "units", "emoji"]


def test_the_report_can_be_printed_anywhere_and_stored_as_json():
    bad = [result(GOLD, "raised"), result("empty", 1.0, source="[red]other")]
    report = report_of(*GOOD, *bad, *(result(SAMPLE, s) for s in (0.0, 1.0)))
    stream = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    print_report(report, Console(file=stream, width=160, markup=False))
    stream.seek(0)
    text = stream.read()
    for part in (
        "error: raised (mine)", "it was raised", "train row 0, gold, 'text of gold \\ud800 [bold]'", "warning: hack ([red]other)",
        "0 of 1 groups of 2 samples", "not ready to train on: 1 error, 1 warning", "500.0 ms", "reward.timeout_s=30",
    ):  # fmt: skip
        assert part in text
    assert json.loads(json.dumps(report.as_dict()))["problems"][0]["kind"] == "raised"
