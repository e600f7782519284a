"""What several algorithms would do with one batch: the record, its tables for a terminal, and its picture as one SVG.

The picture has three parts, in which every row is an algorithm: the cosines with the norms and fractions; the push on each response; pieces
of responses, token by token. Blue is agreement, or more likely; red is the opposite.
"""

import dataclasses
import io
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TextIO

from rich.cells import cell_len
from rich.columns import Columns
from rich.console import Console
from rich.table import Table
from rich.terminal_theme import DEFAULT_TERMINAL_THEME
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
        """Return everything, as JSON."""
        return json.dumps(dataclasses.asdict(self), indent=1, ensure_ascii=False)


def describe_source(source: dict[str, Any]) -> str:
    """Return what was compared, in one line."""
    drift = f", after one optimizer step of {source['drift_algorithm']} with lr {source['drift']:g}" if source.get("drift") else ""
    return (
        f"{source['rows']} responses to {source['prompts']} prompts, {source['tokens']} tokens, step {source['step']}; policy "
        f"{source['model']}{drift}; largest |log-ratio| {source['largest_log_ratio']:.2g}"
    )


def print_comparison(comparison: Comparison, stream: TextIO) -> None:
    """Print the tables: numbers and cosines, then the tokens that each algorithm pushes most (two up and two down).

    In a narrow terminal lines are broken; no number is cut.
    """
    numbers = _numbers_table(comparison.results)
    cosines = _cosine_table(comparison)
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
    """Return the text on one line, with signs for line ends, tabs and characters that cannot be shown."""
    named = {"\n": "↵", "\t": "⇥", "\r": "␍"}
    return "".join(named.get(c, c if c.isprintable() else "�") for c in text)


def number(value: float | None, digits: int = 3) -> str:
    """Return the number as text; a dash for None."""
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
    """Return the table; texts are cut to what the numbers leave of `width`."""
    labels = ("share", "advantage", "ratio", "row")
    numbers = _table("the tokens pushed most", *labels)
    table = _table("the tokens pushed most", *labels)
    table.add_column("token in its place", no_wrap=True)
    places = []
    for r in results:
        for pushed, sign, style in ((r.pushed_up, "+", "bold green"), (r.pushed_down, "-", "bold red")):
            for token in pushed[:_NUM_TOKENS]:
                marked = (f"[{visible(token.token)}]", style)
                places.append(Text.assemble(visible(token.before), marked, visible(token.after)))
                share = f"{sign}{token.share:.2%}"
                numbers.add_row(Text(r.name), share, f"{token.advantage:+.2f}", f"{token.ratio:.3f}", str(token.row))
    left = max(width - SafeConsole(width=_ANY_WIDTH).measure(numbers).maximum - 2, _LEAST_TEXT)
    for *cells, place in zip(*(column.cells for column in numbers.columns), places, strict=True):
        place.truncate(left, overflow="ellipsis")
        table.add_row(*cells, place)
    return table


def _table(title: str, *labels: str) -> Table:
    """Return a table with a column of names, and a column of numbers for each label."""
    table = Table("", title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    for label in labels:
        table.add_column(label, justify="right", no_wrap=True)
    return table


# -- the picture: tables of coloured cells, which rich draws as one SVG without a script -------------------------------------------------

_PICTURE_WIDTH = 200
_MAX_RESPONSES = 256
"""Responses that the second part has room for."""
_RESPONSES_PER_LINE = 80
_LEVELS = 12
_UP = (33, 102, 172)
_DOWN = (178, 24, 43)
_FULL = "on #afb8c1"
_EMPTY = "on #eaeef2"
_SVG = """\
<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">
<style>
.{unique_id}-matrix {{ font-family: Menlo, Consolas, 'DejaVu Sans Mono', monospace; font-size: {char_height}px }}
{styles}
</style>
<defs>{lines}</defs>
<rect width="{width}" height="{height}" fill="#fff"/>
<g transform="translate({terminal_x}, 8)">{backgrounds}<g class="{unique_id}-matrix">{matrix}</g></g>
</svg>
"""


def draw_comparison(comparison: Comparison) -> str:
    """Return the picture, as the text of an SVG file."""
    console = SafeConsole(record=True, file=io.StringIO(), width=_PICTURE_WIDTH, color_system="truecolor", force_terminal=True)
    console.print(
        Text("What each algorithm would do with the same batch", "bold"), Text(describe_source(comparison.source)), sep="\n"
    )
    _heading(console, "Gradients", "cosine between each two; norm; shares of tokens")
    console.print(_gradients(comparison))
    total = len(comparison.row_scores)
    cut = f"; the first {_MAX_RESPONSES} of {total}" if total > _MAX_RESPONSES else ""
    about = f"the sum of the pushes on each response, those to one prompt together; blue: more likely, red: less likely{cut}"
    _heading(console, "Responses", about)
    console.print(*_responses(comparison), sep="\n")
    _heading(console, "Tokens", "the push on each token of responses with strong ones; blue: more likely, red: less likely")
    console.print(Columns([_excerpt(comparison, excerpt) for excerpt in comparison.excerpts], padding=(1, 4)))
    console.print(*(Text(visible(f"{name}: not comparable, {reason}")) for name, reason in comparison.not_comparable), sep="\n")
    return console.export_svg(theme=DEFAULT_TERMINAL_THEME, code_format=_SVG)


def _heading(console: Console, title: str, about: str) -> None:
    console.print(Text.assemble("\n", (f"{title}  ", "bold"), (about, "dim")))


def _gradients(comparison: Comparison) -> Table:
    """Return the table of cosines, norms and fractions."""
    shares = {label: name for label, name in SHARES.items() if label != "dual clip"}
    table = _picture_table()
    table.add_row("", "", *(f"({i})".center(8) for i, _ in enumerate(comparison.results, 1)), "|gradient|", *shares)
    largest = max(r.grad_norm for r in comparison.results) or 1.0
    for i, (r, row) in enumerate(zip(comparison.results, comparison.cosines, strict=True), 1):
        cosines = [Text(number(cosine, 2).center(8), _colour(cosine)) for cosine in row]
        fractions = [getattr(r, share) for share in shares.values()]
        norm = _meter(f"{r.grad_norm:.3g}", r.grad_norm / largest, 20)
        table.add_row(f"({i})", _name(r), *cosines, norm, *(_meter(number(f), f or 0.0, 9) for f in fractions))
    return table


def _responses(comparison: Comparison) -> Iterator[Table | Text]:
    """Yield tables of the push on each response: one column per response, prompts side by side."""
    scores = comparison.row_scores[:_MAX_RESPONSES]
    low = min(scores)
    high = max(scores)
    span = (high - low) or 1.0
    greys = [round(240 - 200 * (score - low) / span) for score in scores]
    rows = [(Text("reward"), [f"on #{grey:02x}{grey:02x}{grey:02x}" for grey in greys])]
    for r in comparison.results:
        pushes = r.row_pushes[:_MAX_RESPONSES]
        peak = max(map(abs, pushes))
        rows.append((_name(r), [_push_colour(push, peak) for push in pushes]))
    for first in range(0, len(scores), _RESPONSES_PER_LINE):
        prompts = comparison.row_prompts[first : first + _RESPONSES_PER_LINE]
        gaps = ["", *(" " * (a != b) for a, b in pairwise(prompts))]
        table = _picture_table()
        for name, colours in rows:
            line = Text()
            for gap, colour in zip(gaps, colours[first : first + _RESPONSES_PER_LINE], strict=False):
                line.append(gap).append(" ", colour)
            table.add_row(name, line)
        yield table
    yield Text(f"reward from {low:g} (white) to {high:g} (black)", "dim")


def _excerpt(comparison: Comparison, excerpt: Excerpt) -> Table:
    """Return the table of a piece of a response: the tokens above, a line for each algorithm below."""
    tokens = [visible(token).replace(" ", "␣") for token in excerpt.tokens]
    table = _picture_table(Text(visible(f"row {excerpt.row}, reward {excerpt.score:g}: …{excerpt.prompt}")))
    table.add_row("", "…" if excerpt.start else "", *map(Text, tokens), "…" if excerpt.is_cut else "")
    for r, pushes in zip(comparison.results, excerpt.pushes, strict=True):
        cells = []
        for token, push in zip(tokens, pushes, strict=True):
            cells.append(Text(" " * cell_len(token), _push_colour(push, r.largest_push)))
        table.add_row(_name(r), " ", *cells)
    return table


def _picture_table(title: Text | None = None) -> Table:
    return Table(title=title, title_justify="left", box=None, show_header=False, pad_edge=False, padding=(0, 1, 0, 0))


def _name(result: AlgorithmResult) -> Text:
    return Text(visible(result.name))


def _meter(text: str, share: float, width: int) -> Text:
    """Return the text on a bar that is filled up to `share`."""
    filled = round(width * min(share, 1.0))
    meter = Text(text.ljust(width), _EMPTY)
    meter.stylize(_FULL, 0, filled)
    return meter


def _push_colour(push: float, peak: float) -> str:
    """Return the colour of a push; the square root makes small pushes visible beside large ones."""
    if not peak:
        return _colour(0.0)
    strength = math.sqrt(min(abs(push) / peak, 1.0))
    return _colour(math.copysign(strength, push))


def _colour(value: float | None) -> str:
    """Return white at 0 to blue at 1 and red at -1, in steps; grey for None."""
    if value is None:
        return _EMPTY
    step = min(round(abs(value) * _LEVELS), _LEVELS) / _LEVELS
    full = _UP if value >= 0 else _DOWN
    shades = "".join(f"{round(246 + (part - 246) * step):02x}" for part in full)
    text = "#ffffff" if step > 0.6 else "#000000"
    return f"{text} on #{shades}"
