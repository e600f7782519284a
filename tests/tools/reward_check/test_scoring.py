"""What is asked, how often and in which order."""

import functools
import threading

from helpers.rewards import fails_on_six, length

from lockstep.embedded.task import make_tokenizer
from lockstep.rewards.manager import RewardManager
from lockstep.rewards.outcome import Failure, Score
from lockstep.tools.reward_check.fuzz import Earns, Response
from lockstep.tools.reward_check.rows import TriedRow
from lockstep.tools.reward_check.scoring import GOLD, MAX_TIMEOUTS, Case, make_cases, make_subjects, score_twice
from lockstep.tools.reward_check.traps import Traps


def make_row(number=0, source="mine", ground_truth=None, **reward_model):
    item = {"data_source": source, "raw_prompt": f"question {number}", "index": number}
    truth = str(number) if ground_truth is None else ground_truth
    return TriedRow.of("train", number, item | {"reward_model": {"ground_truth": truth} | reward_model})


def make_manager(compute_score=None, **more):
    return RewardManager(tokenizer=make_tokenizer(), num_examine=0, compute_score=compute_score, num_workers=2, **more)


def cases_of(subjects, *texts):
    return [Case(subject, Response(text, text, Earns.ANYTHING)) for subject in subjects for text in texts]


def test_every_case_is_asked_twice_the_second_time_in_the_opposite_order():
    asked = []

    def judge(solution_str):
        asked.append(solution_str)
        return len(asked)

    manager = make_manager(judge)
    texts = [f"text {i}" for i in range(5)]
    results = score_twice(manager, cases_of(make_subjects(manager, [make_row()], False, 5), *texts), num_at_once=1)
    assert asked == texts + texts[::-1]
    assert [result.outcomes for result in results] == [(Score(i), Score(11 - i)) for i in range(1, 6)]
    assert all(0 <= s < 1 for result in results for s in result.seconds)


def test_the_judges_of_a_row_are_combined_with_its_weights_and_a_failing_one_is_named():
    manager = make_manager(length, functions={"fragile": fails_on_six}, weights={"*": {"rule": 0.5, "fragile": 2.0}})
    subjects = make_subjects(manager, [make_row()], False, 5)
    good, bad = score_twice(manager, cases_of(subjects, "one two", "six 6"), num_at_once=2)
    manager.close()
    assert good.outcomes == (Score(0.5 * 2 + 2.0 * 2.0),) * 2
    assert len(good.seconds) == 4
    for outcome in bad.outcomes:
        assert isinstance(outcome, Failure)
        assert outcome.kind == "raised"
        assert outcome.text.startswith("judge 'fragile': ")
        assert "ZeroDivisionError" in outcome.text


def test_what_always_hangs_is_given_up():
    release = threading.Event()
    manager = make_manager(lambda solution_str: release.wait(60), timeout_s=0.02)
    results = score_twice(manager, cases_of(make_subjects(manager, [make_row()], False, 5), *map(str, range(100))), num_at_once=1)
    release.set()
    asked = [result for result in results if result.outcomes]
    assert len(asked) == MAX_TIMEOUTS
    assert all(outcome.kind == "timeout" for result in asked for outcome in result.outcomes)


def test_rows_that_only_the_model_judges_are_left_out():
    manager = make_manager(functools.partial(length))
    rows = [make_row(0), make_row(1, style="model"), make_row(2, weights={"model": 1.0, "rule": 0.5})]
    subjects = make_subjects(manager, rows, True, 5)
    assert [(subject.row.index, subject.weights) for subject in subjects] == [(0, {"rule": 1.0}), (2, {"rule": 0.5})]


def test_every_row_gets_gold_and_cheap_nonsense_and_each_source_some_expensive_responses():
    manager = make_manager(length)
    rows = [make_row(i, source) for source in ("one", "two") for i in range(5)]
    with Traps() as traps:
        cases = make_cases(make_subjects(manager, rows, False, 5), traps)
    names = [case.response.name for case in cases]
    assert names.count(GOLD) == names.count("empty") == names.count("echo of the prompt") == 10
    assert names.count("1 MB of text") == names.count("program that opens a socket") == 4
    assert names.count("two answers, the last one wrong") == 4
    echo = next(case for case in cases if case.response.name == "echo of the prompt")
    assert echo.response.text == echo.subject.row.prompt
