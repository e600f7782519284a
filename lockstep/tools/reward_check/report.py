"""What is wrong with a reward, from what its judges said: problems with examples, counts, times."""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lockstep.rewards.outcome import Failure, Outcome, Score
from lockstep.tools.reward_check.fuzz import Earns
from lockstep.tools.reward_check.scoring import GOLD, MAX_TIMEOUTS, SAMPLE, CaseResult

ERRORS = {
    "raised": "the reward raised an exception",
    "crashed": "the process of the reward ended",
    "timeout": "the reward did not answer in time",
    "invalid": "the reward returned something that is not a finite number",
    "differs": "the same response got different results",
    "gold wrong": "a right answer does not get the most",
    "escape": "a program left the sandbox",
}
WARNINGS = {
    "hack": "a worthless response is paid",
    "no signal": "the samples of every group have the same score, so there is nothing to learn",
}
_NUM_EXAMPLES = 3
_NUM_STORED = 4000
"""Characters kept of a response and of a traceback."""


@dataclass(frozen=True, slots=True)
class Example:
    """One response that shows a problem."""

    text: str
    """What happened."""
    row: str | None = None
    """Split and number of the row."""
    response_kind: str | None = None
    response: str | None = None


@dataclass(slots=True)
class Problem:
    """One kind of problem with one data_source."""

    kind: str
    """A key of ERRORS or WARNINGS."""
    data_source: str | None
    count: int = 0
    by_response: dict[str, int] = field(default_factory=dict)
    """Kind of response -> how often."""
    examples: list[Example] = field(default_factory=list)
    """A few, of as many kinds of response as possible."""

    @property
    def is_error(self) -> bool:
        return self.kind in ERRORS


@dataclass(frozen=True, slots=True)
class SourceSummary:
    """What is known of one data_source."""

    data_source: str | None
    num_rows: int
    num_without_gold: int
    """Rows that have no right answer to try."""
    gold_target: float | None
    """What a right answer must get; None where none got a score."""
    num_gold_right: int
    num_gold_wrong: int
    """Right answers without a score are in neither number: they are failures."""
    num_calls: int
    mean_s: float
    max_s: float


@dataclass(frozen=True, slots=True)
class KindSummary:
    """What one kind of response got."""

    kind: str
    num_cases: int
    num_missing: int
    """Cases without a score."""
    num_paid: int
    """Cases with a score above 0."""
    max_score: float | None


@dataclass(frozen=True, slots=True)
class Groups:
    """What group-relative advantages would find in the model's samples."""

    num_groups: int
    samples: int
    """Samples a prompt."""
    num_without_signal: int
    """Groups whose scores are all equal."""
    mean_score: float | None


@dataclass(frozen=True, slots=True)
class Report:
    """Everything that the check found."""

    problems: list[Problem]
    sources: list[SourceSummary]
    kinds: list[KindSummary]
    groups: Groups | None
    timeout_s: float
    notes: list[str]
    """What was not measured, and why."""

    @property
    def is_clean(self) -> bool:
        """Whether there is no error; warnings do not count."""
        return not any(problem.is_error for problem in self.problems)

    def as_dict(self) -> dict[str, Any]:
        """The report as JSON can hold it."""
        return {"is_clean": self.is_clean} | dataclasses.asdict(self)


def make_report(
    results: Sequence[CaseResult],
    escapes: Iterable[str],
    timeout_s: float,
    gold_score: float | None = None,
    notes: Sequence[str] = (),
) -> Report:
    """Find the problems.

    A right answer must get `gold_score`; by default, the best that any right answer of its data_source got, and more than nothing or
    more than silence. `escapes` are the signs that a program was outside the sandbox. A response that must earn nothing and is paid, or
    one that must earn less than the right answer of its row and does not, is a warning.
    """
    problems: dict[tuple[str, str | None], Problem] = {}

    def add(kind: str, source: str | None, example: Example) -> None:
        problem = problems.setdefault((kind, source), Problem(kind, source))
        problem.count += 1
        if example.response_kind is not None:
            problem.by_response[example.response_kind] = problem.by_response.get(example.response_kind, 0) + 1
        problem.examples.append(example)

    targets = _gold_targets(results, gold_score)
    scores = {(result.row, result.kind): result.lowest for result in results}
    for result in results:
        for kind, text in _failures(result):
            add(kind, result.source, _example(result, text))
        if result.kind == GOLD:
            # Stated by the user, the target is all there is to compare with.
            silence = scores.get((result.row, "empty")) if gold_score is None else None
            verdict = _gold_verdict(result.lowest, targets.get(result.source), silence)
        else:
            verdict = _paid_verdict(result.case.response.earns, result.highest, scores.get((result.row, GOLD)))
        if verdict is not None:
            add(verdict[0], result.source, _example(result, verdict[1]))
    for text in escapes:
        add("escape", None, Example(text))
    groups = _groups(results)
    if groups is not None and groups.num_without_signal == groups.num_groups:
        text = f"{groups.num_groups} groups of {groups.samples} samples: the task is too hard or too easy for this model"
        add("no signal", None, Example(text))
    for problem in problems.values():
        problem.examples = _different(problem.examples)
    order = [*ERRORS, *WARNINGS]
    unasked = sum(not result.outcomes for result in results)
    return Report(
        problems=sorted(problems.values(), key=lambda problem: (order.index(problem.kind), str(problem.data_source))),
        sources=_sources(results, targets, problems),
        kinds=_kinds(results),
        groups=groups,
        timeout_s=timeout_s,
        notes=[*notes, *([f"{unasked} of {len(results)} responses, after {MAX_TIMEOUTS} time-outs"] if unasked else [])],
    )


def _gold_verdict(score: float | None, target: float | None, silence: float | None) -> tuple[str, str] | None:
    """What is wrong with a right answer's score; `silence` is that of an empty response."""
    if score is None or target is None:
        return None
    if score < target:
        return "gold wrong", f"score {score:g}, not {target:g}"
    if silence is not None and score <= min(silence, 0.0):
        return "gold wrong", f"score {score:g}, no more than an empty response"
    return None


def _paid_verdict(earns: Earns, score: float | None, gold: float | None) -> tuple[str, str] | None:
    """What is wrong with the score of another response; `gold` is that of a right answer to the same row."""
    if score is None or score <= 0:
        return None
    if earns is Earns.NO_ESCAPE:
        return "escape", f"score {score:g}: it ran the right program, which it does only outside"
    if earns is Earns.NOTHING:
        return "hack", f"score {score:g}" + ("" if gold is None else f"; a right answer gets {gold:g}")
    if earns is Earns.LESS_THAN_GOLD and gold is not None and score >= gold:
        return "hack", f"score {score:g}, as much as a right answer"
    return None


def _different(examples: Sequence[Example]) -> list[Example]:
    """A few examples: the first of each kind of response, then the second ones, and so on."""
    seen: Counter[str | None] = Counter()
    turns = []
    for i, example in enumerate(examples):
        turns.append((seen[example.response_kind], i))
        seen[example.response_kind] += 1
    return [examples[i] for _, i in sorted(turns)[:_NUM_EXAMPLES]]


def _failures(result: CaseResult) -> list[tuple[str, str]]:
    """(kind, text) of what went wrong with the calls: each kind once, and a difference between them."""
    found = {outcome.kind: outcome.text for outcome in result.outcomes if isinstance(outcome, Failure)}
    values = [outcome.kind if isinstance(outcome, Failure) else outcome.value for outcome in result.outcomes]
    told = [value if isinstance(value, str) else f"score {value:g}" for value in values]
    differs = [("differs", f"first {told[0]}, then {told[1]}")] if len(set(values)) > 1 else []
    return [*found.items(), *differs]


def _gold_targets(results: Sequence[CaseResult], gold_score: float | None) -> dict[str | None, float]:
    """data_source -> what a right answer must get."""
    targets: dict[str | None, float] = {}
    for result in results:
        score = result.highest
        if result.kind == GOLD and score is not None:
            targets[result.source] = max(targets.get(result.source, score), score) if gold_score is None else gold_score
    return targets


def _groups(results: Sequence[CaseResult]) -> Groups | None:
    groups: dict[tuple[str, int], list[Outcome]] = defaultdict(list)
    for result in results:
        if result.kind == SAMPLE and result.outcomes:
            groups[result.row].append(result.outcomes[0])
    samples = max(map(len, groups.values()), default=0)
    if samples < 2:
        return None
    scores = [[outcome.value for outcome in group if isinstance(outcome, Score)] for group in groups.values()]
    known = [score for group in scores for score in group]
    return Groups(
        num_groups=len(groups),
        samples=samples,
        num_without_signal=sum(len(set(group)) < 2 for group in scores),
        mean_score=sum(known) / len(known) if known else None,
    )


def _sources(
    results: Sequence[CaseResult], targets: Mapping[str | None, float], problems: Mapping[tuple[str, str | None], Problem]
) -> list[SourceSummary]:
    summaries = []
    for source in dict.fromkeys(result.source for result in results):
        of_source = [result for result in results if result.source == source]
        has_gold = {result.row: result.case.subject.gold is not None for result in of_source}
        num_scored = sum(result.kind == GOLD and result.lowest is not None for result in of_source)
        num_wrong = sum(problem.count for key, problem in problems.items() if key == ("gold wrong", source))
        seconds = [s for result in of_source for s in result.seconds]
        summaries.append(
            SourceSummary(
                data_source=source,
                num_rows=len(has_gold),
                num_without_gold=list(has_gold.values()).count(False),
                gold_target=targets.get(source),
                num_gold_right=num_scored - num_wrong,
                num_gold_wrong=num_wrong,
                num_calls=len(seconds),
                mean_s=sum(seconds) / max(len(seconds), 1),
                max_s=max(seconds, default=0.0),
            )
        )
    return summaries


def _kinds(results: Sequence[CaseResult]) -> list[KindSummary]:
    summaries = []
    for kind in dict.fromkeys(result.kind for result in results):
        scores = [result.highest for result in results if result.kind == kind]
        known = [score for score in scores if score is not None]
        summaries.append(
            KindSummary(kind, len(scores), len(scores) - len(known), sum(score > 0 for score in known), max(known, default=None))
        )
    return summaries


def _example(result: CaseResult, text: str) -> Example:
    row, response = result.case.subject.row, result.case.response
    return Example(text[-_NUM_STORED:], f"{row.split} row {row.index}", response.name, response.text[:_NUM_STORED])
