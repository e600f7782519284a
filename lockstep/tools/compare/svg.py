"""A comparison as one SVG, written by hand: no drawing library, no script, one white page that any browser shows.

Three parts, in which every row is an algorithm: the cosines with the norms and fractions; the push on each response; pieces of responses,
token by token. Blue is agreement, or more likely; red is the opposite.
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from html import escape
from itertools import pairwise

from lockstep.tools.compare.report import Comparison, Excerpt, describe_source, visible

_MARGIN, _ROW, _CELL, _BAR, _COLUMN = 28, 26, 50, 150, 74
_MAX_RESPONSES = 256
"""Responses that the second part has room for."""
_STRIP_ROW, _TOKEN_ROW = 15, 15
_LABEL_CHARACTER, _MONO_CHARACTER = 7.0, 7.3
"""Width of a character of 12 pixels, in the proportional font (on the safe side) and in the other."""
_LEVELS = 12
_UP, _DOWN, _INK, _GREY, _FAINT = (33, 102, 172), (178, 24, 43), "#1f2328", "#656d76", "#eaeef2"
_SANS = "system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif"
_MONO = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"


def draw_comparison(comparison: Comparison) -> str:
    """The picture, as the text of an SVG file."""
    names = [r.name for r in comparison.results]
    left = _MARGIN + 14 + max(_LABEL_CHARACTER * len(name) for name in names)
    page = _Page()
    page.text(_MARGIN, 38, "What each algorithm would do with the same batch", size=19, weight=600)
    y = 60.0
    for line in _wrapped(describe_source(comparison.source), 118):
        page.text(_MARGIN, y, line, fill=_GREY)
        y += 17
    y = _draw_gradients(page, comparison, left, y + 14)
    y = _draw_responses(page, comparison, left, y + 40)
    y = _draw_excerpts(page, comparison, left, y + 40)
    for name, reason in comparison.not_comparable:
        for i, line in enumerate(_wrapped(f"{name}: not comparable, {reason}", 118)):
            page.text(_MARGIN + (12 if i else 0), y, line, fill=_GREY)
            y += 17
    return page.svg(y)


def _draw_gradients(page: _Page, comparison: Comparison, left: float, y: float) -> float:
    """Cosines, norms and fractions; returns where the part ends."""
    results, size = comparison.results, len(comparison.results)
    longest = max(_LABEL_CHARACTER * len(r.name) for r in results)
    y = _heading(page, y, "Gradients", "cosine between each two; norm; shares of tokens") + longest * math.sin(math.radians(40)) + 4
    for k, result in enumerate(results):
        page.text(left + k * _CELL + _CELL / 2 + 4, y - 6, result.name, turn=-40)
    bars = left + size * _CELL + 22
    columns = bars + _BAR + 62
    fractions: list[tuple[str, list[float | None]]] = [
        ("clipped", [r.clip_fraction for r in results]),
        ("masked", [r.masked_fraction for r in results]),
        ("silent", [r.silent_fraction for r in results]),
        ("ratio ESS", [r.ratio_effective for r in results]),
        ("push ESS", [r.push_effective for r in results]),
    ]
    page.text(bars, y - 6, "|gradient|", fill=_GREY)
    for c, (label, _) in enumerate(fractions):
        page.text(columns + c * _COLUMN, y - 6, label, fill=_GREY)
    largest = max(r.grad_norm for r in results) or 1.0
    for i, (result, row) in enumerate(zip(results, comparison.cosines, strict=True)):
        top, middle = y + i * _ROW, y + i * _ROW + _ROW / 2 + 4
        page.text(left - 8, middle, result.name, anchor="end")
        for j, cosine in enumerate(row):
            fill = _FAINT if cosine is None else _colour(cosine)
            page.rect(left + j * _CELL, top, _CELL - 2, _ROW - 2, fill)
            ink = "#fff" if cosine is not None and abs(cosine) > 0.6 else _INK
            text = "-" if cosine is None else f"{cosine:.2f}"
            page.text(left + j * _CELL + _CELL / 2 - 1, middle, text, anchor="middle", fill=ink)
        width = result.grad_norm / largest * _BAR
        page.rect(bars, top + 4, max(width, 1), _ROW - 10, "#57606a")
        page.text(bars + max(width, 1) + 6, middle, f"{result.grad_norm:.3g}")
        for c, (_, values) in enumerate(fractions):
            x, value = columns + c * _COLUMN, values[i]
            page.rect(x, top + 4, _COLUMN - 14, _ROW - 10, _FAINT)
            if value is not None:
                page.rect(x, top + 4, (_COLUMN - 14) * min(value, 1.0), _ROW - 10, "#afb8c1")
            page.text(x + 6, middle, "-" if value is None else f"{value:.3f}")
    page.widen(columns + len(fractions) * _COLUMN)
    return y + size * _ROW


def _draw_responses(page: _Page, comparison: Comparison, left: float, y: float) -> float:
    """The push on each response: one column a response, prompts side by side; returns where the part ends."""
    count = min(len(comparison.row_scores), _MAX_RESPONSES)
    cut = f"; the first {count} of {len(comparison.row_scores)}" if count < len(comparison.row_scores) else ""
    about = f"the sum of the pushes on each response, those to one prompt together; blue: more likely, red: less likely{cut}"
    y = _heading(page, y, "Responses", about) + 10
    width = max(3.0, min(14.0, math.floor(880 / count)))
    x, places = left, []
    for before, prompt in pairwise([comparison.row_prompts[0], *comparison.row_prompts[:count]]):
        x += 3.0 if prompt != before else 0.0
        places.append(x)
        x += width
    page.text(left - 8, y + 11, "reward", anchor="end", fill=_GREY)
    scores = comparison.row_scores[:count]
    low, high = min(scores), max(scores)
    greys = [(s - low) / (high - low) if high > low else 0.0 for s in scores]
    page.cells(zip(places, [width] * count, greys, strict=True), y, _STRIP_ROW - 3, _grey)
    y += _STRIP_ROW + 3
    for result in comparison.results:
        page.text(left - 8, y + 11, result.name, anchor="end")
        page.cells(zip(places, [width] * count, _scaled(result.row_pushes[:count]), strict=True), y, _STRIP_ROW - 2, _colour)
        y += _STRIP_ROW
    page.text(left, y + 15, f"reward from {low:g} (white) to {high:g} (black)", fill=_GREY, size=11)
    page.widen(x)
    return y + 15


def _draw_excerpts(page: _Page, comparison: Comparison, left: float, y: float) -> float:
    """Pieces of responses, side by side while they fit; returns where the part ends."""
    if not comparison.excerpts:
        return y
    y = _heading(page, y, "Tokens", "the push on each token of responses with strong ones; blue: more likely, red: less likely")
    x, height = left, 51 + _TOKEN_ROW * len(comparison.results)
    for excerpt in comparison.excerpts:
        about = f"row {excerpt.row}, reward {excerpt.score:g}: …{excerpt.prompt}"
        shown = [visible(token).replace(" ", "␣") for token in excerpt.tokens]
        widths = [max(_MONO_CHARACTER * _columns(token) + 8, 18) for token in shown]
        width = max(sum(widths) + 36, 6.5 * _columns(about) + 24)
        if x > left and x + width > max(page.width, 1200):
            x, y = left, y + height
        _draw_excerpt(page, comparison, excerpt, x, y + 26, about, list(zip(shown, widths, strict=True)), with_names=x == left)
        page.widen(x + width)
        x += width
    return y + height + 24


def _draw_excerpt(
    page: _Page,
    comparison: Comparison,
    excerpt: Excerpt,
    left: float,
    y: float,
    about: str,
    columns: Sequence[tuple[str, float]],
    with_names: bool,
) -> None:
    """One piece: the tokens (text, width of its column) above, a line for each algorithm below."""
    page.text(left, y, about, fill=_GREY, size=11)
    left += 12 if excerpt.start else 0
    x = [left + sum(width for _, width in columns[:i]) for i in range(len(columns) + 1)]
    for at, (token, width) in zip(x, columns, strict=False):
        page.text(at + width / 2, y + 18, token, anchor="middle", mono=True)
    if excerpt.start:
        page.text(left - 2, y + 18, "…", anchor="end", mono=True)
    if excerpt.is_cut:
        page.text(x[-1] + 2, y + 18, "…", mono=True)
    for i, (result, pushes) in enumerate(zip(comparison.results, excerpt.pushes, strict=True)):
        top = y + 25 + i * _TOKEN_ROW
        if with_names:
            page.text(left - 8, top + 11, result.name, anchor="end")
        cells = zip(x, [width - 2 for _, width in columns], _scaled(pushes, result.largest_push), strict=False)
        page.cells(cells, top, _TOKEN_ROW - 2, _colour)


def _heading(page: _Page, y: float, title: str, about: str) -> float:
    page.text(_MARGIN, y, title, size=15, weight=600)
    page.text(_MARGIN + 10.0 * len(title) + 8, y, about, fill=_GREY)
    return y


def _scaled(pushes: Sequence[float], peak: float | None = None) -> list[float]:
    """In [-1, 1]; the square root lets small pushes be seen beside large ones."""
    peak = max((abs(p) for p in pushes), default=0.0) if peak is None else peak
    return [math.copysign(math.sqrt(min(abs(p) / peak, 1.0)), p) if peak else 0.0 for p in pushes]


def _colour(value: float) -> str:
    """White at 0 to blue at 1 and red at -1, in steps."""
    step = min(round(abs(value) * _LEVELS), _LEVELS) / _LEVELS
    return "#" + "".join(f"{round(246 + (c - 246) * step):02x}" for c in (_UP if value >= 0 else _DOWN))


def _grey(value: float) -> str:
    level = round(240 - 200 * round(value * _LEVELS) / _LEVELS)
    return f"#{level:02x}{level:02x}{level:02x}"


def _columns(text: str) -> int:
    """How many columns a monospaced font needs."""
    return sum(2 if unicodedata.east_asian_width(c) in "WF" else 0 if unicodedata.combining(c) else 1 for c in text)


def _wrapped(text: str, width: int) -> list[str]:
    lines = [""]
    for word in text.split():
        if lines[-1] and len(lines[-1]) + 1 + len(word) > width:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return lines


class _Page:
    """Shapes in the order in which they are drawn. `width` is how far they reach, as far as `widen` was told."""

    def __init__(self) -> None:
        self._parts: list[str] = []
        self.width = 900.0

    def widen(self, x: float) -> None:
        """Something is drawn up to x."""
        self.width = max(self.width, x)

    def rect(self, x: float, y: float, width: float, height: float, fill: str) -> None:
        self._parts.append(f'<rect x="{x:.4g}" y="{y:.4g}" width="{width:.4g}" height="{height:.4g}" rx="2" fill="{fill}"/>')

    def cells(self, cells: Iterable[tuple[float, float, float]], y: float, height: float, colour: Callable[[float], str]) -> None:
        """Rectangles (x, width, value) on one line, one path for each colour: a few bytes each."""
        paths: dict[str, str] = {}
        for x, width, value in cells:
            fill = colour(value)
            paths[fill] = paths.get(fill, "") + f"M{x:.4g} {y:.4g}h{width:.4g}v{height:.4g}h-{width:.4g}z"
        self._parts += [f'<path fill="{fill}" d="{path}"/>' for fill, path in paths.items()]

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        size: int = 12,
        fill: str = _INK,
        anchor: str = "start",
        weight: int = 400,
        turn: float = 0.0,
        mono: bool = False,
    ) -> None:
        extra = f' text-anchor="{anchor}"' if anchor != "start" else ""
        extra += f' font-size="{size}"' if size != 12 else ""
        extra += f' font-weight="{weight}"' if weight != 400 else ""
        extra += f' font-family="{_MONO}"' if mono else ""
        extra += f' transform="rotate({turn:g} {x:.4g} {y:.4g})"' if turn else ""
        self._parts.append(f'<text x="{x:.4g}" y="{y:.4g}" fill="{fill}"{extra}>{escape(visible(text))}</text>')

    def svg(self, height: float) -> str:
        width, height = math.ceil(self.width + _MARGIN), math.ceil(height + _MARGIN)
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
            f'font-family="{_SANS}" font-size="12">\n<rect width="{width}" height="{height}" fill="#fff"/>\n'
        )
        return head + "\n".join(self._parts) + "\n</svg>\n"
