"""What several algorithms would do with one batch: the record, and its tables for a terminal. The picture is in `svg`."""

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TextIO

from rich.table import Table
from rich.text import Text

from lockstep.observability.safe_console import SafeConsole

_NUM_TOKENS = 2
_MIN_WIDTH = 132
"""Columns of the tables where the output is no terminal."""
_ANY_WIDTH = 100_000
"""Wider than any table."""
_LEAST_TEXT = 20
"""Characters of a text that are shown, however narrow the terminal is."""


@dataclass(frozen=True)
class TokenPush:
    """One token of a response and what an algorithm does with it."""

    row: int
    """Row of the batch."""
    position: int
    """Position in the response."""
    token: str
    before: str
    """Text before it, from the prompt on if it is near."""
    after: str
    push: float
    """-d loss / d log_prob; above 0 the token becomes more likely."""
    share: float
    """Of the sum of all |push|."""
    advantage: float
    ratio: float
    """Its probability now over that before the update."""


@dataclass(frozen=True)
class AlgorithmResult:
    """One algorithm on the batch. Fractions are of tokens; None is a number that does not exist (a mean over nothing)."""

    name: str
    settings: dict[str, Any]
    """The keys that make it."""
    loss: float
    grad_norm: float
    clip_fraction: float | None
    """Tokens whose loss the clip changed; None for a loss of your own that does not report pg_clipfrac."""
    dual_clip_fraction: float | None
    """Tokens under the dual clip; None likewise."""
    masked_fraction: float
    """Response tokens that are not in the loss: not the policy's, or their row was left out or rejected."""
    silent_fraction: float
    """Response tokens that push nothing: masked, clipped, or with advantage 0."""
    ratio_effective: float | None
    """(sum w)^2 / (n sum w^2) of the n tokens in the loss, w the ratio times the correction's weight: how far from on-policy."""
    push_effective: float | None
    """The same with w = |push|: the share of tokens that the update really rests on."""
    largest_push: float
    """The largest |push| of a token."""
    pushed_up: list[TokenPush]
    """Strongest first, at most one per row."""
    pushed_down: list[TokenPush]
    row_pushes: list[float]
    """For each row of the batch the sum of its tokens' pushes."""


SHARES = {
    "clipped": "clip_fraction",
    "dual clip": "dual_clip_fraction",
    "masked": "masked_fraction",
    "silent": "silent_fraction",
    "ratio ESS": "ratio_effective",
    "push ESS": "push_effective",
}
"""Heading -> the field of a result."""


@dataclass(frozen=True)
class Excerpt:
    """A piece of one response under every algorithm."""

    row: int
    prompt: str
    """The end of the prompt."""
    score: float
    start: int
    """Position of the first token in the response."""
    tokens: list[str]
    pushes: list[list[float]]
    """One list for each algorithm, in the order of the results."""
    is_cut: bool
    """Whether the response goes on."""


@dataclass(frozen=True)
class Comparison:
    """What `lockstep compare` found."""

    source: dict[str, Any]
    """Where the batch and the policy come from: recording, model, step, rows, prompts, tokens, drift, largest_log_ratio, ..."""
    results: list[AlgorithmResult]
    cosines: list[list[float | None]]
    """Between the gradients, in the order of the results; None for a gradient that is zero."""
    row_prompts: list[str]
    """For each row the id of its prompt."""
    row_scores: list[float]
    """For each row its reward."""
    excerpts: list[Excerpt]
    not_comparable: list[tuple[str, str]]
    """(algorithm, reason)"""

    def to_json(self) -> str:
        """Everything, as JSON."""
        return json.dumps(dataclasses.asdict(self), indent=1, ensure_ascii=False)


def describe_source(source: dict[str, Any]) -> str:
    """One line: what was compared."""
    drift = f", after one optimizer step of {source['drift_algorithm']} with lr {source['drift']:g}" if source.get("drift") else ""
    return (
        f"{source['rows']} responses to {source['prompts']} prompts, {source['tokens']} tokens, step {source['step']}; policy "
        f"{source['model']}{drift}; largest |log-ratio| {source['largest_log_ratio']:.2g}"
    )


def print_comparison(comparison: Comparison, stream: TextIO) -> None:
    """The tables: numbers and cosines, then the tokens that each algorithm pushes most (two up and two down). No number is cut where
    the terminal is narrow: its lines are broken."""
    numbers, cosines = _numbers_table(comparison.results), _cosine_table(comparison)
    console = SafeConsole(file=stream)
    needed = max(SafeConsole(file=stream, width=_ANY_WIDTH).measure(table).maximum for table in (numbers, cosines))
    console = SafeConsole(file=stream, width=max(console.width, needed, 0 if console.is_terminal else _MIN_WIDTH))
    console.print(describe_source(comparison.source), highlight=False)
    console.print(numbers)
    console.print(cosines)
    console.print(_tokens_table(comparison.results, console.width))
    for name, reason in comparison.not_comparable:
        console.print(Text.assemble((f"not comparable: {name}: ", "bold"), reason))


def visible(text: str) -> str:
    """The text on one line: line ends, tabs and what cannot be shown as signs."""
    named = {"\n": "↵", "\t": "⇥", "\r": "␍"}
    return "".join(named.get(c, c if c.isprintable() else "�") for c in text)


def number(value: float | None, digits: int = 3) -> str:
    """The number, or a dash where there is none."""
    return "-" if value is None else f"{value:.{digits}f}"


def _numbers_table(results: Sequence[AlgorithmResult]) -> Table:
    table = _table("one batch, one gradient each", "|gradient|", *SHARES)
    for r in results:
        table.add_row(Text(r.name), f"{r.grad_norm:.4g}", *(number(getattr(r, name)) for name in SHARES.values()))
    return table


def _cosine_table(comparison: Comparison) -> Table:
    table = _table("cosine between the gradients", *(f"({i + 1})" for i in range(len(comparison.results))))
    for i, (result, row) in enumerate(zip(comparison.results, comparison.cosines, strict=True)):
        table.add_row(Text(f"({i + 1}) {result.name}"), *map(number, row))
    return table


def _tokens_table(results: Sequence[AlgorithmResult], width: int) -> Table:
    """The texts are cut to what the numbers leave of `width`."""
    labels = ("share", "advantage", "ratio", "row")
    numbers, table = (_table("the tokens pushed most", *labels) for _ in range(2))
    table.add_column("token in its place", no_wrap=True)
    places = []
    for r in results:
        for pushed, sign, style in ((r.pushed_up, "+", "bold green"), (r.pushed_down, "-", "bold red")):
            for token in pushed[:_NUM_TOKENS]:
                places.append(Text.assemble(visible(token.before), (f"[{visible(token.token)}]", style), visible(token.after)))
                numbers.add_row(
                    Text(r.name), f"{sign}{token.share:.2%}", f"{token.advantage:+.2f}", f"{token.ratio:.3f}", str(token.row)
                )
    left = max(width - SafeConsole(width=_ANY_WIDTH).measure(numbers).maximum - 2, _LEAST_TEXT)
    for *cells, place in zip(*(column.cells for column in numbers.columns), places, strict=True):
        place.truncate(left, overflow="ellipsis")
        table.add_row(*cells, place)
    return table


def _table(title: str, *labels: str) -> Table:
    """A table with a column of names, and one of numbers for each label."""
    table = Table("", title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    for label in labels:
        table.add_column(label, justify="right", no_wrap=True)
    return table
