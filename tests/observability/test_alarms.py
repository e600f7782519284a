import gzip
import json
import math
import re
from pathlib import Path

import pytest

from lockstep.observability.alarms import CHECKS, FILE, Alarms
from lockstep.observability.trackers import Tracking

RECORDED = Path(__file__).parent / "histories.json.gz"
"""The metrics that checks read, of whole runs: examples/algorithms on the embedded task (benchmarks/curves.py), and examples/chain."""


def healthy(steps=40):
    """A run that learns: scores rise from 0.2 to 0.8, and with them length, KL and what the critic explains; entropy falls to a third."""
    return [
        {
            "critic/score/mean": 0.2 + 0.6 * done,
            "critic/score/min": 0.0,
            "critic/score/max": 1.0,
            "actor/grad_norm": 1.0 - 0.5 * done,
            "actor/skipped_rows": 0.3,
            "actor/pg_clipfrac": 0.02,
            "actor/log_ratio_max": 1.5,
            "actor/ratio_mean": 1.0,
            "actor/entropy": 0.6 - 0.4 * done,
            "actor/kl_loss": 0.05 * done,
            "actor/ppo_kl": 0.001,
            "response_length/mean": 100.0 + 50 * done,
            "response_length/max": 256.0,
            "response_length/clip_ratio": 0.1,
            "training/groups_with_signal": 0.6,
            "training/rollout_ratio_ess": 0.999,
            "critic/vf_explained_var": -0.1 + 0.5 * done,
            "reward/answer/mean": 0.2 + 0.6 * done,
            "reward/format/mean": 0.5 + 0.5 * done,
        }
        for done in (step / steps for step in range(steps))
    ]


def changed(**metrics):
    """The healthy run with these metrics: a number, or a function of the step."""
    names = {name.replace("__", "/"): value for name, value in metrics.items()}
    return [
        row | {name: value(i) if callable(value) else value for name, value in names.items()} for i, row in enumerate(healthy())
    ]


FAULTS = {
    "equal_rewards": (changed(critic__score__mean=0.0, critic__score__max=0.0), "score (0)", "lockstep rewards check"),
    "no_gradient": (changed(actor__grad_norm=0.0), "gradient was 0", "algorithm.adv_estimator"),
    "cut_responses": (
        changed(response_length__clip_ratio=0.8),
        "80 % of the responses were cut at 256 tokens",
        "data.max_response_length",
    ),
    "silent_groups": (
        changed(training__groups_with_signal=0.04, critic__score__mean=0.01),
        "only 4 % of the groups",
        "actor_rollout_ref.rollout.n",
    ),
    "entropy_collapse": (
        changed(actor__entropy=lambda i: 0.6 * 0.8**i, critic__score__mean=0.2),
        "the entropy fell from",
        "actor_rollout_ref.actor.entropy_coeff",
    ),
    "length_drift": (
        changed(response_length__mean=lambda i: 100.0 + 20 * i, critic__score__mean=0.2),
        "tokens, and the score did not rise",
        "reward.overlong_buffer",
    ),
    "kl_jump": (
        changed(actor__kl_loss=lambda i: 0.02 if i < 30 else 2.0),
        "jumped from about 0.02 to 2",
        "actor_rollout_ref.actor.optim.lr",
    ),
    "useless_values": (changed(critic__vf_explained_var=-0.4), "explained variance -0.40", "critic.optim.lr"),
    "ratio_tails": (
        changed(actor__log_ratio_max=math.log(50), actor__pg_clipfrac=0.4),
        "some token became 50 times",
        "actor_rollout_ref.actor.ppo_epochs",
    ),
    "format_only": (
        changed(reward__format__mean=lambda i: i / 40, reward__answer__mean=0.05),
        "the form, not the answer",
        "reward.weights",
    ),
}


def sounded(history, folder):
    """(step, alarm) in the order in which they sound."""
    alarms = Alarms(folder)
    return [(step, alarm) for step, row in enumerate(history, start=1) for alarm in alarms.step(step, row, [])]


def test_every_check_has_a_run_with_its_fault():
    assert [check.__name__ for check in CHECKS] == list(FAULTS)


def test_the_docs_have_every_alarm_and_its_tracker_works(tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "observability.md").read_text()
    assert re.findall(r"^\| `(\w+)` \| .* \| .* \|$", page.partition("## Alarms")[2].partition("\n## ")[0], re.MULTILINE) == list(
        FAULTS
    )
    (tmp_path / "mine.py").write_text(re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0])
    about = {"project_name": "p", "experiment_name": "e", "run_dir": tmp_path, "config": {}}
    with Tracking([f"{tmp_path}/mine.py:Mine"], **about) as tracking:
        tracking.log({"critic/score/mean": 0.5}, step=1)
        tracking.samples([{"response": "four"}], step=1)
    assert (tmp_path / "mine.txt").read_text() == "1 0.5\n1 'four'\n"


def test_a_run_that_learns_raises_no_alarm(tmp_path):
    assert sounded(healthy(), tmp_path) == []
    assert not (tmp_path / FILE).exists()


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_sounds_its_alarm_once_with_numbers_and_a_key(name, tmp_path):
    history, text, key = FAULTS[name]
    ((step, alarm),) = sounded(history, tmp_path)
    assert alarm.name == name
    assert text in alarm.text
    assert key in alarm.key
    assert alarm.numbers
    (row,) = map(json.loads, (tmp_path / FILE).read_text().splitlines())
    assert (row["step"], row["name"], row["text"], row["key"]) == (step, name, alarm.text, alarm.key)
    assert row["numbers"] == pytest.approx(alarm.numbers)


@pytest.mark.parametrize(
    "history",
    [
        changed(training__groups_with_signal=0.04, critic__score__mean=0.97),
        changed(actor__entropy=lambda i: 0.6 * 0.8**i, critic__score__mean=0.9),
        changed(response_length__mean=lambda i: 100.0 + 20 * i),
        changed(critic__vf_explained_var=lambda i: -0.4 if i < 8 else 0.1),
        changed(actor__kl_loss=lambda i: 0.02 * i),
        changed(reward__format__mean=lambda i: i / 40),
        changed(**dict.fromkeys(("critic__score__mean", "critic__score__max", "actor__grad_norm"), math.nan)),
    ],
    ids=[
        "solved prompts",
        "sure of what is right",
        "longer and better",
        "a late critic",
        "steady KL",
        "form and content",
        "no numbers",
    ],
)
def test_what_looks_like_a_fault_and_is_none(history, tmp_path):
    assert sounded(history, tmp_path) == []


def test_a_task_without_reward_is_known_after_three_steps_and_nothing_else_is_said_of_it(tmp_path):
    """A zero gradient and silent groups have the same cause."""
    zero = changed(critic__score__mean=0.0, critic__score__max=0.0, actor__grad_norm=0.0, training__groups_with_signal=0.0)
    ((step, alarm),) = sounded(zero, tmp_path)
    assert (step, alarm.name) == (3, "equal_rewards")


@pytest.mark.parametrize("name", json.loads(gzip.decompress(RECORDED.read_bytes())))
def test_no_false_alarm_on_recorded_runs(name, tmp_path):
    history = json.loads(gzip.decompress(RECORDED.read_bytes()))[name]
    assert len(history) >= 20
    assert sounded(history, tmp_path) == []


def test_a_resumed_run_knows_what_was_and_was_said_before(tmp_path):
    history, cut = FAULTS["cut_responses"][0], 10
    before = Alarms(tmp_path)
    with (tmp_path / "metrics.jsonl").open("w") as file:
        for step, row in enumerate(history[:cut], start=1):
            before.step(step, row, [{"response": "x"}])
            file.write(json.dumps({"step": step, "time": 0.0, **row}) + "\n")
    (row,) = map(json.loads, (tmp_path / FILE).read_text().splitlines())
    assert (row["step"], row["samples"]) == (3, [{"response": "x"}])
    after = Alarms(tmp_path)
    after.resume(tmp_path / "metrics.jsonl", 10)
    assert after.sounded == before.sounded
    assert all(after.step(step, row, []) == [] for step, row in enumerate(history[cut:], start=cut + 1))
    earlier = Alarms(tmp_path)
    earlier.resume(tmp_path / "metrics.jsonl", 2)  # from a checkpoint before the alarm
    assert (tmp_path / FILE).read_text() == ""
    assert [alarm.name for alarm in earlier.step(3, history[2], [])] == ["cut_responses"], "two of the three steps are in the file"
    new = Alarms(tmp_path)
    new.resume(tmp_path / "metrics.jsonl", 0)
    assert new.sounded == []
    assert new.step(1, history[0], []) == []


def test_a_long_run_keeps_its_first_and_last_steps_only(tmp_path):
    alarms = Alarms(tmp_path)
    for step, row in enumerate(healthy() * 12, start=1):
        alarms.step(step, row, [])
    assert len(alarms._history) <= 420
