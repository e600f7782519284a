"""Trials: which rows are tried with which responses, and what the reward manager said of each, asked twice."""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from lockstep.data.tag import Tag
from lockstep.errors import MissingExtra, MissingReward
from lockstep.judging import extract_program, parses
from lockstep.processes import KillableWorker, function_name
from lockstep.rewards.graders import _select_rm_score_fn
from lockstep.rewards.judges import MODEL, RULE
from lockstep.rewards.manager import RewardManager
from lockstep.rewards.outcome import Failure, Outcome, Score
from lockstep.tools.reward_check.responses import AllowedScore, Response, Traps, cheap_responses, gold_response, odd_responses

GOLD = "gold"
SAMPLE = "sample of the model"
MAX_TIMEOUTS = 16
"""Time-outs after which a check is given up."""
_NUM_ODD_ROWS = 2
"""Rows of each data_source that get the expensive responses."""
_MAX_VISITED = 20_000
"""Rows that are read in search of a rare data_source."""


@dataclass(frozen=True)
class TriedRow:
    """One row of the data, as a reward sees it."""

    split: str
    """"train" or "val"."""
    position: int
    """Its place in the dataset of that split."""
    index: int
    """Its number in the files."""
    data_source: str | None
    prompt: str
    ground_truth: Any
    extra_info: Any
    test_cases: Any
    tag: Tag

    @classmethod
    def of(cls, split: str, position: int, item: Mapping[str, Any]) -> TriedRow:
        """Return the row of an item of RLHFDataset."""
        reward_model = item.get("reward_model") or {}
        ground_truth = reward_model.get("ground_truth")
        return cls(
            split=split,
            position=position,
            index=item.get("index", position),
            data_source=item.get("data_source"),
            prompt=_as_text(item.get("raw_prompt", "")),
            ground_truth=ground_truth,
            extra_info=item.get("extra_info"),
            test_cases=reward_model.get("test_cases") or ground_truth,
            tag=Tag.of(item.get("data_source"), reward_model),
        )


def choose_rows(datasets: Mapping[str, Any], num_rows: int, num_sources: int, seed: int) -> list[TriedRow]:
    """Return at most `num_rows` rows of all splits, as evenly over the data_sources as these allow, drawn by `seed`.

    Rows are read in a random order until each of the `num_sources` data_sources has its share, or 20,000 were read. They come back
    grouped by data_source.
    """
    places = [(split, position) for split, dataset in datasets.items() for position in range(len(dataset))]
    random.Random(seed).shuffle(places)
    share = -(-num_rows // max(num_sources, 1))
    found: dict[str | None, list[TriedRow]] = {}
    for split, position in places[: max(_MAX_VISITED, num_rows)]:
        row = TriedRow.of(split, position, datasets[split][position])
        found.setdefault(row.data_source, []).append(row)
        if sum(len(rows) >= share for rows in found.values()) >= num_sources:
            break
    turns = itertools.chain.from_iterable(itertools.zip_longest(*found.values()))
    chosen = [row for row in turns if row is not None][:num_rows]
    order = list(found)
    return sorted(chosen, key=lambda row: order.index(row.data_source))


def _as_text(prompt: Any) -> str:
    """Return a prompt as the text that a response could echo."""
    if isinstance(prompt, str):
        return prompt
    return "\n".join(str(message["content"]) for message in prompt)


@dataclass(frozen=True)
class JudgedRow:
    """A row with its judges and its right answer."""

    row: TriedRow
    weights: Mapping[str, float]
    """Judge -> weight, without the reward model."""
    runs_programs: bool
    gold: str | None
    """The right answer; None if it is not known."""


@dataclass(frozen=True)
class Trial:
    """One response to one row."""

    judged: JudgedRow
    response: Response


@dataclass(frozen=True)
class TrialResult:
    """What the judges said of a trial."""

    trial: Trial
    outcomes: tuple[Outcome, ...]
    """The weighted sum of the judges' scores, or the failure of one of them. Two; fewer if the check was given up."""
    seconds: tuple[float, ...]
    """How long each call of a function took."""

    @property
    def row(self) -> tuple[str, int]:
        """Split and position of the row."""
        return self.trial.judged.row.split, self.trial.judged.row.position

    @property
    def source(self) -> str | None:
        """The row's data_source."""
        return self.trial.judged.row.data_source

    @property
    def kind(self) -> str:
        """The kind of response."""
        return self.trial.response.name

    @property
    def lowest(self) -> float | None:
        """The lower score; None if both calls failed."""
        return min((outcome.value for outcome in self.outcomes if isinstance(outcome, Score)), default=None)

    @property
    def highest(self) -> float | None:
        """The higher score; None if both calls failed."""
        return max((outcome.value for outcome in self.outcomes if isinstance(outcome, Score)), default=None)


def make_judged_rows(manager: RewardManager, rows: Sequence[TriedRow], has_model: bool, timeout_s: float) -> list[JudgedRow]:
    """Return the rows that a function judges; rows that only a reward model judges are left out."""
    judged = []
    worker = KillableWorker()
    try:
        for row in rows:
            judges = manager.judges_of(row.tag, has_model)
            weights = {judge: weight for judge, weight in judges.items() if judge != MODEL}
            if not weights:
                continue
            functions = [manager.function(judge, row.data_source).function for judge in weights]
            # A user's function for known data is given that data's right answer; that data's rule need not work here.
            with contextlib.suppress(MissingReward, MissingExtra):
                functions.append(_select_rm_score_fn(str(row.data_source)))
            gold = gold_response(functions, row.ground_truth, row.extra_info, worker, timeout_s)
            judged.append(JudgedRow(row, weights, manager.runs_programs(weights, row.data_source), gold))
    finally:
        worker.close()
    return judged


def make_trials(rows: Sequence[JudgedRow], traps: Traps) -> list[Trial]:
    """Return trials of gold answers and cheap nonsense for every row, of expensive responses and attacks for two rows per data_source."""
    trials = []
    for judged in rows:
        if judged.gold is not None:
            trials.append(Trial(judged, Response(GOLD, judged.gold, AllowedScore.MOST)))
        trials += [Trial(judged, response) for response in cheap_responses(judged.row.prompt)]
    for source in dict.fromkeys(judged.row.data_source for judged in rows):
        of_source = [judged for judged in rows if judged.row.data_source == source]
        # Rows with a right answer first: their responses say more.
        with_gold_first = sorted(of_source, key=lambda judged: judged.gold is None)
        for judged in with_gold_first[:_NUM_ODD_ROWS]:
            responses = [
                *odd_responses(judged.gold, _other_gold(judged, of_source)),
                *traps.responses(_prize(judged), judged.runs_programs),
            ]
            trials += [Trial(judged, response) for response in responses]
    return trials


def _other_gold(judged: JudgedRow, rows: Sequence[JudgedRow]) -> str | None:
    """Return the right answer of the first row that has another ground truth."""
    for other in rows:
        if other.gold and other.row.ground_truth != judged.row.ground_truth:
            return other.gold
    return None


def _prize(judged: JudgedRow) -> str | None:
    """Return the program that gives the right answer; None if it is not known."""
    if judged.gold is None:
        return None
    if not judged.runs_programs:
        return f"print({judged.gold!r})"
    program = extract_program(judged.gold)
    texts = [program]
    for place in (judged.row.ground_truth, judged.row.extra_info):
        if isinstance(place, Mapping) and isinstance(place.get("prompt"), str):  # HumanEval: the program is the rest of it
            texts.append(place["prompt"] + program)
    return next(filter(parses, texts), None)


def score_twice(
    manager: RewardManager, trials: Sequence[Trial], num_at_once: int, on_scored: Callable[[], None] = lambda: None
) -> list[TrialResult]:
    """Score every trial, and again in the opposite order, `num_at_once` at a time; return the results in order.

    Each call has the manager's deadline. After MAX_TIMEOUTS calls that pass theirs no more are made: a reward that always hangs would take
    hours. `on_scored` is called after each, in any thread. Raises what the manager raises for rows that it cannot judge.
    """
    late: list[Trial] = []

    def score(trial: Trial) -> tuple[tuple[Outcome, ...], tuple[float, ...]]:
        if len(late) >= MAX_TIMEOUTS:
            return (), ()
        outcome, seconds = _score(manager, trial)
        if isinstance(outcome, Failure) and outcome.kind == "timeout":
            late.append(trial)
        on_scored()
        return (outcome,), seconds

    with ThreadPoolExecutor(num_at_once, "reward-check") as threads:
        first = list(threads.map(score, trials))
        second = list(threads.map(score, reversed(trials)))
    results = []
    for trial, one, two in zip(trials, first, reversed(second), strict=True):
        results.append(TrialResult(trial, one[0] + two[0], one[1] + two[1]))
    return results


def _score(manager: RewardManager, trial: Trial) -> tuple[Outcome, tuple[float, ...]]:
    """Return what the judges of a trial's row say together, and how long each took."""
    row = trial.judged.row
    inputs = {
        "solution_str": trial.response.text,
        "data_source": row.data_source,
        "ground_truth": row.ground_truth,
        "extra_info": row.extra_info,
        "test_cases": row.test_cases,
    }
    weights = trial.judged.weights
    calls = {judge: manager.submit(judge, row.data_source, inputs) for judge in weights}
    outcomes = {judge: call.result() for judge, call in calls.items()}
    names = {judge: f"judge {judge!r}" for judge in weights}
    if RULE in weights:
        names[RULE] = function_name(manager.function(RULE, row.data_source).function)
    return _combine(outcomes, weights, names), tuple(outcome.seconds for outcome in outcomes.values())


def _combine(outcomes: Mapping[str, Outcome], weights: Mapping[str, float], names: Mapping[str, str]) -> Outcome:
    """Return the weighted sum, or the first failure. `names`: judge -> its function in a failure's text."""
    total = 0.0
    for judge, outcome in outcomes.items():
        if isinstance(outcome, Failure):
            return replace(outcome, text=f"{names[judge]}: {outcome.text}")
        total += weights[judge] * outcome.value
    return Score(total)
