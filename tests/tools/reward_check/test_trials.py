"""The choice of rows, and the number and order of their trials."""

import functools
import threading
from collections import Counter

from helpers.rewards import fails_on_six, length
from hypothesis import given
from hypothesis import strategies as st

from lockstep.embedded.task import make_tokenizer
from lockstep.rewards.manager import RewardManager
from lockstep.rewards.outcome import Failure, Score
from lockstep.tools.reward_check.responses import AllowedScore, Response, Traps
from lockstep.tools.reward_check.trials import (
    GOLD,
    MAX_TIMEOUTS,
    Trial,
    TriedRow,
    choose_rows,
    make_judged_rows,
    make_trials,
    score_twice,
)


def item(source, number=0):
    return {
        "data_source": source,
        "raw_prompt": [{"role": "system", "content": "be brief"}, {"role": "user", "content": f"question {number}"}],
        "reward_model": {"style": "rule", "ground_truth": str(number), "test_cases": None},
        "index": 100 + number,
    }


@given(st.lists(st.integers(1, 30), min_size=1, max_size=4), st.integers(1, 60), st.integers(0, 5))
def test_rows_are_spread_over_the_sources_as_evenly_as_these_allow(sizes, num_rows, seed):
    rows = [item(f"source {s}", i) for s, size in enumerate(sizes) for i in range(size)]
    datasets = {"train": rows[::2], "val": rows[1::2]}
    chosen = choose_rows(datasets, num_rows, len(sizes), seed)
    assert len(chosen) == min(num_rows, len(rows))
    assert len({(row.split, row.position) for row in chosen}) == len(chosen)
    counts = Counter(row.data_source for row in chosen)
    for s, size in enumerate(sizes):
        fewer = size > counts[f"source {s}"]
        assert not fewer or counts[f"source {s}"] >= max(counts.values()) - 1
    assert chosen == choose_rows(datasets, num_rows, len(sizes), seed)


def test_a_row_is_what_a_reward_function_sees():
    (row,) = choose_rows({"val": [item("mine", 7)]}, 5, 1, seed=0)
    assert (row.split, row.position, row.index, row.data_source) == ("val", 0, 107, "mine")
    assert (row.prompt, row.ground_truth, row.test_cases, row.extra_info) == ("be brief\nquestion 7", "7", "7", None)


def test_a_row_with_nothing_but_a_prompt_is_a_row():
    (row,) = choose_rows({"train": [{"raw_prompt": "hello", "prompt_ids": [1]}]}, 5, 1, seed=0)
    assert (row.prompt, row.data_source, row.ground_truth) == ("hello", None, None)


def make_row(number=0, source="mine", ground_truth=None, **reward_model):
    item = {"data_source": source, "raw_prompt": f"question {number}", "index": number}
    truth = str(number) if ground_truth is None else ground_truth
    return TriedRow.of("train", number, item | {"reward_model": {"ground_truth": truth} | reward_model})


def make_manager(compute_score=None, **more):
    return RewardManager(tokenizer=make_tokenizer(), num_examine=0, compute_score=compute_score, num_workers=2, **more)


def trials_of(rows, *texts):
    return [Trial(judged, Response(text, text, AllowedScore.ANYTHING)) for judged in rows for text in texts]


def test_every_trial_is_asked_twice_the_second_time_in_the_opposite_order():
    asked = []

    def judge(solution_str):
        asked.append(solution_str)
        return len(asked)

    manager = make_manager(judge)
    texts = [f"text {i}" for i in range(5)]
    results = score_twice(manager, trials_of(make_judged_rows(manager, [make_row()], False, 5), *texts), num_at_once=1)
    assert asked == texts + texts[::-1]
    assert [result.outcomes for result in results] == [(Score(i), Score(11 - i)) for i in range(1, 6)]
    assert all(0 <= s < 1 for result in results for s in result.seconds)


def test_the_judges_of_a_row_are_combined_with_its_weights_and_a_failing_one_is_named():
    manager = make_manager(length, functions={"fragile": fails_on_six}, weights={"*": {"rule": 0.5, "fragile": 2.0}})
    judged = make_judged_rows(manager, [make_row()], False, 5)
    good, bad = score_twice(manager, trials_of(judged, "one two", "six 6"), num_at_once=2)
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
    results = score_twice(
        manager, trials_of(make_judged_rows(manager, [make_row()], False, 5), *map(str, range(100))), num_at_once=1
    )
    release.set()
    asked = [result for result in results if result.outcomes]
    assert len(asked) == MAX_TIMEOUTS
    assert all(outcome.kind == "timeout" for result in asked for outcome in result.outcomes)


def test_rows_that_only_the_model_judges_are_left_out():
    manager = make_manager(functools.partial(length))
    rows = [make_row(0), make_row(1, style="model"), make_row(2, weights={"model": 1.0, "rule": 0.5})]
    judged = make_judged_rows(manager, rows, True, 5)
    assert [(one.row.index, one.weights) for one in judged] == [(0, {"rule": 1.0}), (2, {"rule": 0.5})]


def test_every_row_gets_gold_and_cheap_nonsense_and_each_source_some_expensive_responses():
    manager = make_manager(length)
    rows = [make_row(i, source) for source in ("one", "two") for i in range(5)]
    with Traps() as traps:
        trials = make_trials(make_judged_rows(manager, rows, False, 5), traps)
    names = [trial.response.name for trial in trials]
    assert names.count(GOLD) == names.count("empty") == names.count("echo of the prompt") == 10
    assert names.count("1 MB of text") == names.count("program that opens a socket") == 4
    assert names.count("two answers, the last one wrong") == 4
    echo = next(trial for trial in trials if trial.response.name == "echo of the prompt")
    assert echo.response.text == echo.judged.row.prompt
