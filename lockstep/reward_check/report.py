"""What is wrong with a reward, from what its judges said: problems with examples, counts, times; as tables and as JSON."""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lockstep.reward_check.fuzz import Earns
from lockstep.reward_check.scoring import GOLD, MAX_TIMEOUTS, SAMPLE, Result
from lockstep.utils.outcome import FAILURE_KINDS, Failure, Outcome, Score

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
_NUM_EXAMPLES, _NUM_SHOWN, _NUM_LINES = 3, 160, 8
_NUM_STORED = 4000


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
    examples: list[Example] = field(default_factory=list)
    """The first ones."""

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
    num_gold_wrong: int
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
    results: Sequence[Result], escapes: Iterable[str], timeout_s: float, gold_score: float | None = None, notes: Sequence[str] = ()
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
        if len(problem.examples) < _NUM_EXAMPLES:
            problem.examples.append(example)

    targets = _gold_targets(results, gold_score)
    scores = {(_row_key(result), result.case.response.name): _lowest(result.outcomes) for result in results}
    gold_wrong: Counter[str | None] = Counter()
    for result in results:
        source, name = result.case.subject.row.data_source, result.case.response.name
        for kind, text in _failures(result):
            add(kind, source, _example(result, text))
        score = _highest(result.outcomes)
        if score is None:
            continue
        silence = scores.get((_row_key(result), "empty"))
        if name == GOLD:
            lowest = _lowest(result.outcomes)
            assert lowest is not None
            if lowest < targets[source]:
                gold_wrong[source] += 1
                add("gold wrong", source, _example(result, f"score {lowest:g}, not {targets[source]:g}"))
            elif gold_score is None and lowest <= 0 and silence is not None and lowest <= silence:
                gold_wrong[source] += 1
                add("gold wrong", source, _example(result, f"score {lowest:g}, no more than an empty response"))
        elif result.case.response.earns is Earns.NO_ESCAPE and score > 0:
            add("escape", source, _example(result, f"score {score:g}: it ran the right program, which it does only outside"))
        else:
            gold = scores.get((_row_key(result), GOLD))
            hack = _hack(result.case.response.earns, score, gold)
            if hack is not None:
                add("hack", source, _example(result, hack))
    for text in escapes:
        add("escape", None, Example(text))
    unasked = sum(not result.outcomes for result in results)
    notes = [*notes, *([f"{unasked} of {len(results)} responses, after {MAX_TIMEOUTS} time-outs"] if unasked else [])]
    groups = _groups(results)
    if groups is not None and groups.num_without_signal == groups.num_groups:
        text = f"{groups.num_groups} groups of {groups.samples} samples: the task is too hard or too easy for this model"
        add("no signal", None, Example(text))
    order = [*ERRORS, *WARNINGS]
    return Report(
        problems=sorted(problems.values(), key=lambda problem: (order.index(problem.kind), str(problem.data_source))),
        sources=_sources(results, targets, gold_wrong),
        kinds=_kinds(results),
        groups=groups,
        timeout_s=timeout_s,
        notes=notes,
    )


def _hack(earns: Earns, score: float, gold: float | None) -> str | None:
    if earns is Earns.NOTHING and score > 0:
        return f"score {score:g}" + (f", a right answer gets {gold:g}" if gold is not None else "")
    if earns in (Earns.NOTHING, Earns.LESS_THAN_GOLD) and gold is not None and score >= gold and score > 0:
        return f"score {score:g}, as much as a right answer"
    return None


def _failures(result: Result) -> list[tuple[str, str]]:
    """(kind, text) of what went wrong with the calls: each kind once, and a difference between them."""
    found = {outcome.kind: outcome.text for outcome in result.outcomes if isinstance(outcome, Failure)}
    values = [outcome.kind if isinstance(outcome, Failure) else outcome.value for outcome in result.outcomes]
    told = [value if isinstance(value, str) else f"score {value:g}" for value in values]
    differs = [("differs", f"first {told[0]}, then {told[1]}")] if len(set(values)) > 1 else []
    return [*found.items(), *differs]


def _gold_targets(results: Sequence[Result], gold_score: float | None) -> dict[str | None, float]:
    """data_source -> what a right answer must get."""
    targets: dict[str | None, float] = {}
    for result in results:
        score = _highest(result.outcomes)
        if result.case.response.name == GOLD and score is not None:
            source = result.case.subject.row.data_source
            targets[source] = max(targets.get(source, score), score) if gold_score is None else gold_score
    return targets


def _groups(results: Sequence[Result]) -> Groups | None:
    groups: dict[tuple[str, int], list[Outcome]] = defaultdict(list)
    for result in results:
        if result.case.response.name == SAMPLE and result.outcomes:
            groups[_row_key(result)].append(result.outcomes[0])
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


def _sources(results: Sequence[Result], targets: dict[str | None, float], wrong: Counter[str | None]) -> list[SourceSummary]:
    summaries = []
    for source in dict.fromkeys(result.case.subject.row.data_source for result in results):
        of_source = [result for result in results if result.case.subject.row.data_source == source]
        has_gold = {_row_key(result): result.case.subject.gold is not None for result in of_source}
        seconds = [s for result in of_source for s in result.seconds]
        summaries.append(
            SourceSummary(
                data_source=source,
                num_rows=len(has_gold),
                num_without_gold=list(has_gold.values()).count(False),
                gold_target=targets.get(source),
                num_gold_wrong=wrong[source],
                num_calls=len(seconds),
                mean_s=sum(seconds) / max(len(seconds), 1),
                max_s=max(seconds, default=0.0),
            )
        )
    return summaries


def _kinds(results: Sequence[Result]) -> list[KindSummary]:
    summaries = []
    for kind in dict.fromkeys(result.case.response.name for result in results):
        scores = [_highest(result.outcomes) for result in results if result.case.response.name == kind]
        known = [score for score in scores if score is not None]
        summaries.append(
            KindSummary(kind, len(scores), len(scores) - len(known), sum(score > 0 for score in known), max(known, default=None))
        )
    return summaries


def _row_key(result: Result) -> tuple[str, int]:
    return result.case.subject.row.split, result.case.subject.row.position


def _highest(outcomes: Iterable[Outcome]) -> float | None:
    return max((outcome.value for outcome in outcomes if isinstance(outcome, Score)), default=None)


def _lowest(outcomes: Iterable[Outcome]) -> float | None:
    return min((outcome.value for outcome in outcomes if isinstance(outcome, Score)), default=None)


def _example(result: Result, text: str) -> Example:
    row, response = result.case.subject.row, result.case.response
    return Example(text[-_NUM_STORED:], f"{row.split} row {row.index}", response.name, response.text[:_NUM_STORED])


# -- tables ----------------------------------------------------------------------------------------------------------------------


def print_report(report: Report, console: Console) -> None:
    """The tables, then the problems with examples, then the verdict."""
    console.print(_source_table(report))
    console.print(f"time is that of one call; reward.timeout_s={report.timeout_s:g}\n")
    console.print(_kind_table(report), "")
    for note in report.notes:
        console.print(Text(f"not measured: {note}"), soft_wrap=True)
    if (groups := report.groups) is not None:
        mean = "none has a score" if groups.mean_score is None else f"mean score {groups.mean_score:.3f}"
        console.print(
            Text(
                f"signal: {groups.num_without_signal} of {groups.num_groups} groups of {groups.samples} samples have equal scores and "
                f"carry no signal for group-relative advantages; {mean}"
            ),
            soft_wrap=True,
        )
    for problem in report.problems:
        console.print(_problem_text(problem), soft_wrap=True)
    errors = sum(problem.is_error for problem in report.problems)
    warnings = len(report.problems) - errors
    verdict = "clean" if report.is_clean else "not ready to train on"
    console.print(Text(f"\n{verdict}: {_counted(errors, 'error')}, {_counted(warnings, 'warning')}", style="bold"))


def _source_table(report: Report) -> Table:
    names = (
        "data_source",
        "rows",
        "gold right",
        "gold wrong",
        "no gold",
        "gold score",
        *FAILURE_KINDS,
        "differs",
        "calls",
        "mean",
        "max",
    )
    table = _table(names)
    for source in report.sources:
        counts = {problem.kind: problem.count for problem in report.problems if problem.data_source == source.data_source}
        wrong = source.num_gold_wrong
        tried = source.num_rows - source.num_without_gold
        # A right answer without a score is neither right nor wrong: it is among the failures.
        scored = 0 if source.gold_target is None else tried
        table.add_row(
            str(source.data_source),
            str(source.num_rows),
            str(scored - wrong),
            str(wrong),
            str(source.num_without_gold),
            _number(source.gold_target),
            *(str(counts.get(kind, 0)) for kind in (*FAILURE_KINDS, "differs")),
            str(source.num_calls),
            _seconds(source.mean_s),
            _seconds(source.max_s),
        )
    return table


def _kind_table(report: Report) -> Table:
    table = _table(("response", "tried", "no score", "paid", "best score"))
    for kind in report.kinds:
        table.add_row(kind.kind, str(kind.num_cases), str(kind.num_missing), str(kind.num_paid), _number(kind.max_score))
    return table


def _table(names: Sequence[str]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for i, name in enumerate(names):
        table.add_column(name, justify="right" if i else "left", overflow="fold")
    return table


def _problem_text(problem: Problem) -> Text:
    label, about = ("error", ERRORS[problem.kind]) if problem.is_error else ("warning", WARNINGS[problem.kind])
    where = "" if problem.data_source is None else f" ({problem.data_source})"
    text = Text(f"\n{label}: {problem.kind}: {about}: {problem.count} x{where}", style="red" if problem.is_error else "yellow")
    for example in problem.examples:
        what = "" if example.row is None else f"{example.row}, {example.response_kind}, "
        shown = "" if example.response is None else f"{_shown(example.response)}: "
        lines = example.text.rstrip().splitlines()
        told = "\n    ".join(lines[-_NUM_LINES:] if len(lines) > 1 else lines)
        text.append(f"\n  {what}{shown}{told}", style="default")
    return text


def _shown(response: str) -> str:
    """The start of a response on one line; what a terminal cannot print is escaped."""
    return ascii(response[:_NUM_SHOWN]) + ("..." if len(response) > _NUM_SHOWN else "")


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:g}"


def _seconds(value: float) -> str:
    return f"{value * 1000:.1f} ms" if value < 1 else f"{value:.2f} s"


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"
