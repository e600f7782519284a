"""Make the responses to try, and ask the reward manager about each of them twice."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import islice

from lockstep.errors import MissingExtra, MissingReward
from lockstep.judging import extract_program, parses
from lockstep.processes import KillableWorker, function_name
from lockstep.rewards.graders import _select_rm_score_fn
from lockstep.rewards.judges import MODEL, RULE
from lockstep.rewards.manager import RewardManager
from lockstep.rewards.outcome import Failure, Outcome, Score
from lockstep.tools.reward_check.fuzz import Earns, Response, cheap_responses, odd_responses
from lockstep.tools.reward_check.gold import gold_response
from lockstep.tools.reward_check.rows import TriedRow
from lockstep.tools.reward_check.traps import Traps

GOLD = "gold"
SAMPLE = "sample of the model"
MAX_TIMEOUTS = 16
"""Time-outs after which a check is given up."""
_ODD_ROWS = 2
"""Rows of each data_source that get the expensive responses."""


@dataclass(frozen=True)
class Subject:
    """A row with its judges and its right answer."""

    row: TriedRow
    weights: Mapping[str, float]
    """Judge -> weight, without the reward model."""
    runs_programs: bool
    gold: str | None


@dataclass(frozen=True)
class Case:
    """One response to one row."""

    subject: Subject
    response: Response


@dataclass(frozen=True)
class CaseResult:
    """What the judges said of a case."""

    case: Case
    outcomes: tuple[Outcome, ...]
    """The weighted sum of the judges' scores, or the failure of one of them. Two; fewer when the check was given up."""
    seconds: tuple[float, ...]
    """How long each call of a function took."""

    @property
    def row(self) -> tuple[str, int]:
        """Split and position of the row."""
        return self.case.subject.row.split, self.case.subject.row.position

    @property
    def source(self) -> str | None:
        """The row's data_source."""
        return self.case.subject.row.data_source

    @property
    def kind(self) -> str:
        """The kind of response."""
        return self.case.response.name

    @property
    def lowest(self) -> float | None:
        """The lower score; None where there is none."""
        return min((outcome.value for outcome in self.outcomes if isinstance(outcome, Score)), default=None)

    @property
    def highest(self) -> float | None:
        """The higher score; None where there is none."""
        return max((outcome.value for outcome in self.outcomes if isinstance(outcome, Score)), default=None)


def make_subjects(manager: RewardManager, rows: Sequence[TriedRow], has_model: bool, timeout_s: float) -> list[Subject]:
    """The rows that a function judges; those that only a reward model judges are left out."""
    subjects = []
    worker = KillableWorker()
    try:
        for row in rows:
            chosen = manager.judges_of(row.tag, has_model)
            weights = {judge: weight for judge, weight in chosen.items() if judge != MODEL}
            if not weights:
                continue
            functions = [manager.function(judge, row.data_source).function for judge in weights]
            # A user's function for known data is given that data's right answer; that data's rule need not work here.
            with contextlib.suppress(MissingReward, MissingExtra):
                functions.append(_select_rm_score_fn(str(row.data_source)))
            gold = gold_response(functions, row.ground_truth, row.extra_info, worker, timeout_s)
            subjects.append(Subject(row, weights, manager.runs_programs(weights, row.data_source), gold))
    finally:
        worker.close()
    return subjects


def make_cases(subjects: Sequence[Subject], traps: Traps) -> list[Case]:
    """Gold answers and cheap nonsense for every row; the expensive responses and the attacks for two rows of each data_source."""
    cases = []
    for subject in subjects:
        if subject.gold is not None:
            cases.append(Case(subject, Response(GOLD, subject.gold, Earns.MOST)))
        cases += [Case(subject, response) for response in cheap_responses(subject.row.prompt)]
    for source in dict.fromkeys(subject.row.data_source for subject in subjects):
        of_source = [subject for subject in subjects if subject.row.data_source == source]
        # Rows with a right answer first: their responses say more.
        for subject in islice(sorted(of_source, key=lambda s: s.gold is None), _ODD_ROWS):
            other = next((s.gold for s in of_source if s.row.ground_truth != subject.row.ground_truth and s.gold), None)
            cases += [Case(subject, response) for response in odd_responses(subject.gold, other)]
            cases += [Case(subject, response) for response in traps.responses(_prize(subject), subject.runs_programs)]
    return cases


def _prize(subject: Subject) -> str | None:
    """The program that gives the right answer; None where that is not known."""
    if subject.gold is None:
        return None
    if not subject.runs_programs:
        return f"print({subject.gold!r})"
    program = extract_program(subject.gold)
    texts = [program]
    for place in (subject.row.ground_truth, subject.row.extra_info):
        if isinstance(place, Mapping) and isinstance(place.get("prompt"), str):  # HumanEval: the program is the rest of it
            texts.append(place["prompt"] + program)
    return next(filter(parses, texts), None)


def score_twice(
    manager: RewardManager, cases: Sequence[Case], num_at_once: int, on_scored: Callable[[], None] = lambda: None
) -> list[CaseResult]:
    """Ask about every case, and again in the opposite order. Each call has the manager's deadline; after a few that pass theirs, no more
    are made: what hangs always would take hours.

    `num_at_once` cases are asked about at a time; `on_scored` is called after each, in any thread. Raises what the manager raises for rows
    that it cannot judge.
    """
    late: list[Case] = []

    def ask(case: Case) -> tuple[tuple[Outcome, ...], tuple[float, ...]]:
        if len(late) >= MAX_TIMEOUTS:
            return (), ()
        outcome, seconds = _ask(manager, case)
        if isinstance(outcome, Failure) and outcome.kind == "timeout":
            late.append(case)
        on_scored()
        return (outcome,), seconds

    with ThreadPoolExecutor(num_at_once, "reward-check") as threads:
        first = list(threads.map(ask, cases))
        second = list(threads.map(ask, reversed(cases)))[::-1]
    return [CaseResult(case, one[0] + two[0], one[1] + two[1]) for case, one, two in zip(cases, first, second, strict=True)]


def _ask(manager: RewardManager, case: Case) -> tuple[Outcome, tuple[float, ...]]:
    row = case.subject.row
    names = ("data_source", "ground_truth", "extra_info", "test_cases")
    known = {"solution_str": case.response.text} | {name: getattr(row, name) for name in names}
    asked = {judge: manager.submit(judge, row.data_source, known) for judge in case.subject.weights}
    outcomes = {judge: future.result() for judge, future in asked.items()}
    own = function_name(manager.function(RULE, row.data_source).function) if RULE in asked else ""
    names_of = {judge: own if judge == RULE else f"judge {judge!r}" for judge in asked}
    return _combine(outcomes, case.subject.weights, names_of), tuple(outcome.seconds for outcome in outcomes.values())


def _combine(outcomes: Mapping[str, Outcome], weights: Mapping[str, float], names: Mapping[str, str]) -> Outcome:
    """The weighted sum, or the first failure; `names` are those of the functions behind the judges."""
    total = 0.0
    for judge, outcome in outcomes.items():
        if isinstance(outcome, Failure):
            return replace(outcome, text=f"{names[judge]}: {outcome.text}")
        total += weights[judge] * outcome.value
    return Score(total)
