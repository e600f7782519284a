"""A report as a person reads it."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lockstep.rewards.outcome import FAILURE_KINDS
from lockstep.tools.reward_check.report import ERRORS, WARNINGS, Problem, Report

_NUM_SHOWN = 80
_NUM_LINES = 8


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
    label, about = ("error", ERRORS[problem.kind]) if problem.is_error else ("warning", WARNINGS[problem.kind])
    where = "" if problem.data_source is None else f" ({problem.data_source})"
    text = Text(f"\n{label}: {problem.kind}{where}: {about}, {problem.count} x", style="red" if problem.is_error else "yellow")
    if problem.by_response:
        text.append(f": {'; '.join(f'{kind} {count}' for kind, count in problem.by_response.items())}")
    previous = ""
    for example in problem.examples:
        what = "" if example.row is None else f"{example.row}, {example.response_kind}, "
        shown = "" if example.response is None else f"{_shown(example.response)}: "
        lines = example.text.rstrip().splitlines()
        told = "\n    ".join(lines[-_NUM_LINES:]) if len(lines) == 1 or example.text != previous else "the same"
        previous = example.text
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
