"""What is wrong with a reward, from what its judges said: problems with examples, counts, times."""

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Example:
    """One response that shows a problem."""

    text: str
    """What happened."""
    row: str | None = None
    """Split and number of the row."""
    response_kind: str | None = None
    response: str | None = None


@dataclass(frozen=True)
class Problem:
    """One kind of problem with one data_source."""

    kind: str
    """A key of ERRORS or WARNINGS."""
    data_source: str | None
    count: int
    by_response: dict[str, int]
    """Kind of response -> how often."""
    examples: list[Example]
    """A few, of as many kinds of response as possible."""

    @property
    def is_error(self) -> bool:
        return self.kind in ERRORS


@dataclass(frozen=True)
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


@dataclass(frozen=True)
class KindSummary:
    """What one kind of response got."""

    kind: str
    num_cases: int
    num_missing: int
    """Cases without a score."""
    num_paid: int
    """Cases with a score above 0."""
    max_score: float | None


@dataclass(frozen=True)
class Groups:
    """What group-relative advantages would find in the model's samples."""

    num_groups: int
    samples: int
    """Samples per prompt."""
    num_without_signal: int
    """Groups whose scores are all equal."""
    mean_score: float | None


@dataclass(frozen=True)
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
    # (kind of problem, data_source) -> kind of response -> examples
    found: dict[tuple[str, str | None], dict[str | None, list[Example]]] = defaultdict(lambda: defaultdict(list))
    targets = _gold_targets(results, gold_score)
    scores = {(result.row, result.kind): result.lowest for result in results}
    for result in results:
        # Stated by the user, the target is all there is to compare with.
        silence = scores.get((result.row, "empty")) if gold_score is None else None
        for kind, text in (
            *_failures(result),
            *_verdict(result, targets.get(result.source), silence, scores.get((result.row, GOLD))),
        ):
            found[kind, result.source][result.kind].append(_example(result, text))
    for text in escapes:
        found["escape", None][None].append(Example(text))
    groups = _groups(results)
    if groups is not None and groups.num_without_signal == groups.num_groups:
        text = f"{groups.num_groups} groups of {groups.samples} samples: the task is too hard or too easy for this model"
        found["no signal", None][None].append(Example(text))
    order = [*ERRORS, *WARNINGS]
    problems = [_problem(*key, found[key]) for key in sorted(found, key=lambda key: (order.index(key[0]), str(key[1])))]
    unasked = sum(not result.outcomes for result in results)
    return Report(
        problems=problems,
        sources=_sources(results, targets, problems),
        kinds=_kinds(results),
        groups=groups,
        timeout_s=timeout_s,
        notes=[*notes, *([f"{unasked} of {len(results)} responses, after {MAX_TIMEOUTS} time-outs"] if unasked else [])],
    )


def _verdict(result: CaseResult, target: float | None, silence: float | None, gold: float | None) -> Iterator[tuple[str, str]]:
    """(kind, text) of what is wrong with a score. `target` is what a right answer must get, `silence` what an empty response to the same
    row gets, `gold` what a right answer to it does.
    """
    earns = result.case.response.earns
    low = result.lowest
    high = result.highest
    if low is None or high is None:
        return
    if result.kind == GOLD:
        if target is not None and low < target:
            yield "gold wrong", f"score {low:g}, not {target:g}"
        elif silence is not None and low <= min(silence, 0.0):
            yield "gold wrong", f"score {low:g}, no more than an empty response"
    elif high > 0 and earns is Earns.NO_ESCAPE:
        yield "escape", f"score {high:g}: it ran the right program, which it does only outside"
    elif high > 0 and earns is Earns.NOTHING:
        yield "hack", f"score {high:g}" + ("" if gold is None else f"; a right answer gets {gold:g}")
    elif high > 0 and earns is Earns.LESS_THAN_GOLD and gold is not None and high >= gold:
        yield "hack", f"score {high:g}, as much as a right answer"


def _problem(kind: str, source: str | None, by_response: Mapping[str | None, list[Example]]) -> Problem:
    """With a few examples: the first of each kind of response, then the second ones, and so on."""
    counts = {response: len(examples) for response, examples in by_response.items()}
    turns = itertools.chain.from_iterable(itertools.zip_longest(*by_response.values()))
    named = {response: count for response, count in counts.items() if response is not None}
    return Problem(kind, source, sum(counts.values()), named, list(filter(None, turns))[:_NUM_EXAMPLES])


def _failures(result: CaseResult) -> Iterator[tuple[str, str]]:
    """(kind, text) of what went wrong with the calls: each kind once, and a difference between them."""
    yield from {outcome.kind: outcome.text for outcome in result.outcomes if isinstance(outcome, Failure)}.items()
    told = [outcome.kind if isinstance(outcome, Failure) else f"score {outcome.value:g}" for outcome in result.outcomes]
    if len({outcome.kind if isinstance(outcome, Failure) else outcome.value for outcome in result.outcomes}) > 1:
        yield "differs", f"first {told[0]}, then {told[1]}"


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
    results: Sequence[CaseResult], targets: Mapping[str | None, float], problems: Sequence[Problem]
) -> list[SourceSummary]:
    summaries = []
    for source in dict.fromkeys(result.source for result in results):
        of_source = [result for result in results if result.source == source]
        has_gold = {result.row: result.case.subject.gold is not None for result in of_source}
        num_scored = sum(result.kind == GOLD and result.lowest is not None for result in of_source)
        num_wrong = sum(p.count for p in problems if (p.kind, p.data_source) == ("gold wrong", source))
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
    row = result.case.subject.row
    response = result.case.response
    return Example(text[-_NUM_STORED:], f"{row.split} row {row.index}", response.name, response.text[:_NUM_STORED])
