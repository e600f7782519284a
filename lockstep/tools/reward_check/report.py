"""What is wrong with a reward, from the results of its trials: problems with examples, counts, times; and their tables."""

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lockstep.rewards.outcome import FAILURE_KINDS, Failure, Outcome, Score
from lockstep.tools.reward_check.responses import AllowedScore
from lockstep.tools.reward_check.trials import GOLD, MAX_TIMEOUTS, SAMPLE, TrialResult

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
_NUM_SHOWN = 80
"""Characters of a response that are printed."""
_NUM_LINES = 8
"""Lines of a traceback that are printed."""
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
class GroupSummary:
    """What group-relative advantages would find in the model's samples."""

    num_groups: int
    samples: int
    """Samples per prompt."""
    num_without_signal: int
    """GroupSummary whose scores are all equal."""
    mean_score: float | None


@dataclass(frozen=True)
class Report:
    """Everything that the check found."""

    problems: list[Problem]
    sources: list[SourceSummary]
    kinds: list[KindSummary]
    groups: GroupSummary | None
    timeout_s: float
    notes: list[str]
    """What was not measured, and why."""

    @property
    def is_clean(self) -> bool:
        """Whether there is no error; warnings do not count."""
        return not any(problem.is_error for problem in self.problems)

    def as_dict(self) -> dict[str, Any]:
        """Return the report as JSON can hold it."""
        return {"is_clean": self.is_clean} | dataclasses.asdict(self)


def make_report(
    results: Sequence[TrialResult],
    escapes: Iterable[str],
    timeout_s: float,
    gold_score: float | None = None,
    notes: Sequence[str] = (),
) -> Report:
    """Return the report: the problems, and what was counted.

    A right answer must get `gold_score`; by default, the best that any right answer of its data_source got, and more than nothing or
    more than silence. `escapes` are the signs that a program was outside the sandbox. A response that may get nothing and is paid is a
    warning, and so is one that gets as much as the right answer of its row although it must get less.
    """
    # (kind of problem, data_source) -> kind of response -> examples
    found: dict[tuple[str, str | None], dict[str | None, list[Example]]] = defaultdict(lambda: defaultdict(list))
    targets = _gold_targets(results, gold_score)
    scores = {(result.row, result.kind): result.lowest for result in results}
    for result in results:
        # Stated by the user, the target is all there is to compare with.
        silence = scores.get((result.row, "empty")) if gold_score is None else None
        gold = scores.get((result.row, GOLD))
        wrong_scores = _wrong_scores(result, targets.get(result.source), silence, gold)
        for kind, text in (*_failures(result), *wrong_scores):
            found[kind, result.source][result.kind].append(_example(result, text))
    for text in escapes:
        found["escape", None][None].append(Example(text))
    groups = _groups(results)
    if groups is not None and groups.num_without_signal == groups.num_groups:
        text = f"{groups.num_groups} groups of {groups.samples} samples: the task is too hard or too easy for this model"
        found["no signal", None][None].append(Example(text))
    order = [*ERRORS, *WARNINGS]
    sorted_keys = sorted(found, key=lambda key: (order.index(key[0]), str(key[1])))
    problems = [_problem(kind, source, found[kind, source]) for kind, source in sorted_keys]
    all_notes = list(notes)
    num_untried = sum(not result.outcomes for result in results)
    if num_untried:
        all_notes.append(f"{num_untried} of {len(results)} responses, after {MAX_TIMEOUTS} time-outs")
    return Report(
        problems=problems,
        sources=_sources(results, targets, problems),
        kinds=_kinds(results),
        groups=groups,
        timeout_s=timeout_s,
        notes=all_notes,
    )


def _wrong_scores(
    result: TrialResult, target: float | None, silence: float | None, gold: float | None
) -> Iterator[tuple[str, str]]:
    """Yield (kind, text) of what is wrong with a score.

    `target` is the score that a right answer must get. An empty response to the same row gets `silence`, a right answer to it `gold`.
    """
    allowed = result.trial.response.allowed
    low = result.lowest
    high = result.highest
    if low is None or high is None:
        return
    if result.kind == GOLD:
        if target is not None and low < target:
            yield "gold wrong", f"score {low:g}, not {target:g}"
        elif silence is not None and low <= min(silence, 0.0):
            yield "gold wrong", f"score {low:g}, no more than an empty response"
    elif high > 0 and allowed is AllowedScore.NO_ESCAPE:
        yield "escape", f"score {high:g}: it ran the right program, which it does only outside"
    elif high > 0 and allowed is AllowedScore.NOTHING:
        right = "" if gold is None else f"; a right answer gets {gold:g}"
        yield "hack", f"score {high:g}{right}"
    elif high > 0 and allowed is AllowedScore.LESS_THAN_GOLD and gold is not None and high >= gold:
        yield "hack", f"score {high:g}, as much as a right answer"


def _problem(kind: str, source: str | None, by_response: Mapping[str | None, list[Example]]) -> Problem:
    """Return the problem with a few examples: the first of each kind of response, then the second of each, and so on."""
    num_examples = sum(map(len, by_response.values()))
    counts = {response: len(examples) for response, examples in by_response.items() if response is not None}
    turns = itertools.chain.from_iterable(itertools.zip_longest(*by_response.values()))
    examples = [example for example in turns if example is not None]
    return Problem(kind, source, num_examples, counts, examples[:_NUM_EXAMPLES])


def _failures(result: TrialResult) -> Iterator[tuple[str, str]]:
    """Yield (kind, text) of what went wrong with the calls: each kind once, and a difference between them."""
    failures: dict[str, str] = {}
    values: set[str | float] = set()
    texts = []
    for outcome in result.outcomes:
        if isinstance(outcome, Failure):
            failures[outcome.kind] = outcome.text
            values.add(outcome.kind)
            texts.append(outcome.kind)
        else:
            values.add(outcome.value)
            texts.append(f"score {outcome.value:g}")
    yield from failures.items()
    if len(values) > 1:
        yield "differs", f"first {texts[0]}, then {texts[1]}"


def _gold_targets(results: Sequence[TrialResult], gold_score: float | None) -> dict[str | None, float]:
    """Return data_source -> the score that a right answer must get."""
    targets: dict[str | None, float] = {}
    for result in results:
        score = result.highest
        if result.kind != GOLD or score is None:
            continue
        best = max(targets.get(result.source, score), score)
        targets[result.source] = best if gold_score is None else gold_score
    return targets


def _groups(results: Sequence[TrialResult]) -> GroupSummary | None:
    groups: dict[tuple[str, int], list[Outcome]] = defaultdict(list)
    for result in results:
        if result.kind == SAMPLE and result.outcomes:
            groups[result.row].append(result.outcomes[0])
    samples = max(map(len, groups.values()), default=0)
    if samples < 2:
        return None
    scores = [[outcome.value for outcome in group if isinstance(outcome, Score)] for group in groups.values()]
    known = [score for group in scores for score in group]
    return GroupSummary(
        num_groups=len(groups),
        samples=samples,
        num_without_signal=sum(len(set(group)) < 2 for group in scores),
        mean_score=sum(known) / len(known) if known else None,
    )


def _sources(
    results: Sequence[TrialResult], targets: Mapping[str | None, float], problems: Sequence[Problem]
) -> list[SourceSummary]:
    summaries = []
    for source in dict.fromkeys(result.source for result in results):
        of_source = [result for result in results if result.source == source]
        has_gold = {result.row: result.trial.judged.gold is not None for result in of_source}
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


def _kinds(results: Sequence[TrialResult]) -> list[KindSummary]:
    summaries = []
    for kind in dict.fromkeys(result.kind for result in results):
        scores = [result.highest for result in results if result.kind == kind]
        known = [score for score in scores if score is not None]
        summaries.append(
            KindSummary(kind, len(scores), len(scores) - len(known), sum(score > 0 for score in known), max(known, default=None))
        )
    return summaries


def _example(result: TrialResult, text: str) -> Example:
    row = result.trial.judged.row
    response = result.trial.response
    return Example(text[-_NUM_STORED:], f"{row.split} row {row.index}", response.name, response.text[:_NUM_STORED])


# -- as a person reads it ----------------------------------------------------------------------------------------------------------------


def print_report(report: Report, console: Console) -> None:
    """Print the tables, then the problems with examples, then whether the reward is ready to train on."""
    console.print(_source_table(report))
    console.print(f"time is that of one call; reward.timeout_s={report.timeout_s:g}\n")
    console.print(_kind_table(report), "")
    for note in report.notes:
        console.print(Text(f"not measured: {note}"), soft_wrap=True)
    groups = report.groups
    if groups is not None:
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
        table.add_row(
            str(source.data_source),
            str(source.num_rows),
            str(source.num_gold_right),
            str(source.num_gold_wrong),
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
    label = "error" if problem.is_error else "warning"
    style = "red" if problem.is_error else "yellow"
    about = ERRORS[problem.kind] if problem.is_error else WARNINGS[problem.kind]
    where = "" if problem.data_source is None else f" ({problem.data_source})"
    text = Text(f"\n{label}: {problem.kind}{where}: {about}, {problem.count} x", style=style)
    if problem.by_response:
        counts = [f"{kind} {count}" for kind, count in problem.by_response.items()]
        text.append(f": {'; '.join(counts)}")
    previous = ""
    for example in problem.examples:
        what = "" if example.row is None else f"{example.row}, {example.response_kind}, "
        shown = "" if example.response is None else f"{_shown(example.response)}: "
        lines = example.text.rstrip().splitlines()
        is_repeated = len(lines) != 1 and example.text == previous
        details = "the same" if is_repeated else "\n    ".join(lines[-_NUM_LINES:])
        previous = example.text
        text.append(f"\n  {what}{shown}{details}", style="default")
    return text


def _shown(response: str) -> str:
    """Return the start of a response on one line; what a terminal cannot print is escaped."""
    return ascii(response[:_NUM_SHOWN]) + ("..." if len(response) > _NUM_SHOWN else "")


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:g}"


def _seconds(value: float) -> str:
    return f"{value * 1000:.1f} ms" if value < 1 else f"{value:.2f} s"


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"
