"""A comparison as one SVG: tables of coloured cells, which rich draws. No script, one white page that any browser shows.

Three parts, in which every row is an algorithm: the cosines with the norms and fractions; the push on each response; pieces of responses,
token by token. Blue is agreement, or more likely; red is the opposite.
"""

import io
import math
from collections.abc import Iterator
from itertools import pairwise

from rich.cells import cell_len
from rich.columns import Columns
from rich.console import Console
from rich.table import Table
from rich.terminal_theme import DEFAULT_TERMINAL_THEME
from rich.text import Text

from lockstep.observability.safe_console import SafeConsole
from lockstep.tools.compare.report import SHARES, AlgorithmResult, Comparison, Excerpt, describe_source, number, visible

_WIDTH = 200
_MAX_RESPONSES, _LINE = 256, 80
"""Responses that the second part has room for, and how many of them stand on one line."""
_LEVELS = 12
_UP, _DOWN, _FULL, _EMPTY = (33, 102, 172), (178, 24, 43), "on #afb8c1", "on #eaeef2"
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
    """The picture, as the text of an SVG file."""
    console = SafeConsole(record=True, file=io.StringIO(), width=_WIDTH, color_system="truecolor", force_terminal=True)
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
    """Cosines, norms and fractions."""
    shares = {label: name for label, name in SHARES.items() if label != "dual clip"}
    table = _table()
    table.add_row("", "", *(f"({i})".center(8) for i, _ in enumerate(comparison.results, 1)), "|gradient|", *shares)
    largest = max(r.grad_norm for r in comparison.results) or 1.0
    for i, (r, row) in enumerate(zip(comparison.results, comparison.cosines, strict=True), 1):
        cosines = [Text(number(cosine, 2).center(8), _colour(cosine)) for cosine in row]
        fractions = [getattr(r, share) for share in shares.values()]
        norm = _meter(f"{r.grad_norm:.3g}", r.grad_norm / largest, 20)
        table.add_row(f"({i})", _name(r), *cosines, norm, *(_meter(number(f), f or 0.0, 9) for f in fractions))
    return table


def _responses(comparison: Comparison) -> Iterator[Table | Text]:
    """The push on each response: one column per response, prompts side by side."""
    scores = comparison.row_scores[:_MAX_RESPONSES]
    low, high = min(scores), max(scores)
    greys = [round(240 - 200 * (score - low) / ((high - low) or 1.0)) for score in scores]
    rows = [(Text("reward"), [f"on #{3 * f'{grey:02x}'}" for grey in greys])]
    for r in comparison.results:
        pushes = r.row_pushes[:_MAX_RESPONSES]
        rows.append((_name(r), [_push_colour(push, max(map(abs, pushes))) for push in pushes]))
    for first in range(0, len(scores), _LINE):
        prompts = comparison.row_prompts[first : first + _LINE]
        gaps = ["", *(" " * (a != b) for a, b in pairwise(prompts))]
        table = _table()
        for name, colours in rows:
            line = Text()
            for gap, colour in zip(gaps, colours[first : first + _LINE], strict=False):
                line.append(gap).append(" ", colour)
            table.add_row(name, line)
        yield table
    yield Text(f"reward from {low:g} (white) to {high:g} (black)", "dim")


def _excerpt(comparison: Comparison, excerpt: Excerpt) -> Table:
    """A piece of a response: the tokens above, a line for each algorithm below."""
    tokens = [visible(token).replace(" ", "␣") for token in excerpt.tokens]
    table = _table(Text(visible(f"row {excerpt.row}, reward {excerpt.score:g}: …{excerpt.prompt}")))
    table.add_row("", "…" if excerpt.start else "", *map(Text, tokens), "…" if excerpt.is_cut else "")
    for r, pushes in zip(comparison.results, excerpt.pushes, strict=True):
        cells = [
            Text(" " * cell_len(token), _push_colour(push, r.largest_push)) for token, push in zip(tokens, pushes, strict=True)
        ]
        table.add_row(_name(r), " ", *cells)
    return table


def _table(title: Text | None = None) -> Table:
    return Table(title=title, title_justify="left", box=None, show_header=False, pad_edge=False, padding=(0, 1, 0, 0))


def _name(result: AlgorithmResult) -> Text:
    return Text(visible(result.name))


def _meter(text: str, share: float, width: int) -> Text:
    """The text on a bar that is filled up to `share`."""
    filled = round(width * min(share, 1.0))
    meter = Text(text.ljust(width), _EMPTY)
    meter.stylize(_FULL, 0, filled)
    return meter


def _push_colour(push: float, peak: float) -> str:
    """The square root lets small pushes be seen beside large ones."""
    return _colour(math.copysign(math.sqrt(min(abs(push) / peak, 1.0)), push) if peak else 0.0)


def _colour(value: float | None) -> str:
    """White at 0 to blue at 1 and red at -1, in steps; grey where there is no number."""
    if value is None:
        return _EMPTY
    step = min(round(abs(value) * _LEVELS), _LEVELS) / _LEVELS
    shades = "".join(f"{round(246 + (c - 246) * step):02x}" for c in (_UP if value >= 0 else _DOWN))
    return f"{'#ffffff' if step > 0.6 else '#000000'} on #{shades}"
