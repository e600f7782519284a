"""A comparison as one SVG, written by hand: no drawing library, no script, one white page that any browser shows.

Three parts, in which every row is an algorithm: the cosines with the norms and fractions; the push on each response; pieces of responses,
token by token. Blue is agreement, or more likely; red is the opposite.
"""

from __future__ import annotations

import itertools
import math
import textwrap
import unicodedata
from collections import defaultdict
from collections.abc import Callable, Sequence
from html import escape

from lockstep.tools.compare.report import SHARES, Comparison, Excerpt, describe_source, number, visible

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
    page.text(_MARGIN, 38, "What each algorithm would do with the same batch", font_size=19, font_weight=600)
    y = page.paragraph(60.0, describe_source(comparison.source))
    y = _draw_gradients(page, comparison, left, y + 14)
    y = _draw_responses(page, comparison, left, y + 40)
    y = _draw_excerpts(page, comparison, left, y + 40)
    for name, reason in comparison.not_comparable:
        y = page.paragraph(y, f"{name}: not comparable, {reason}", indent=12)
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
    shares = {label: name for label, name in SHARES.items() if label != "dual clip"}
    page.text(bars, y - 6, "|gradient|", fill=_GREY)
    for c, label in enumerate(shares):
        page.text(columns + c * _COLUMN, y - 6, label, fill=_GREY)
    largest = max(r.grad_norm for r in results) or 1.0
    for i, (result, row) in enumerate(zip(results, comparison.cosines, strict=True)):
        top, middle = y + i * _ROW, y + i * _ROW + _ROW / 2 + 4
        page.text(left - 8, middle, result.name, text_anchor="end")
        for j, cosine in enumerate(row):
            x = left + j * _CELL
            page.rect(x, top, _CELL - 2, _ROW - 2, _FAINT if cosine is None else _colour(cosine))
            ink = "#fff" if abs(cosine or 0.0) > 0.6 else _INK
            page.text(x + _CELL / 2 - 1, middle, number(cosine, 2), text_anchor="middle", fill=ink)
        width = max(result.grad_norm / largest * _BAR, 1)
        page.rect(bars, top + 4, width, _ROW - 10, "#57606a")
        page.text(bars + width + 6, middle, f"{result.grad_norm:.3g}")
        for c, name in enumerate(shares.values()):
            x, value = columns + c * _COLUMN, getattr(result, name)
            page.rect(x, top + 4, _COLUMN - 14, _ROW - 10, _FAINT)
            if value is not None:
                page.rect(x, top + 4, (_COLUMN - 14) * min(value, 1.0), _ROW - 10, "#afb8c1")
            page.text(x + 6, middle, number(value))
    page.widen(columns + len(shares) * _COLUMN)
    return y + size * _ROW


def _draw_responses(page: _Page, comparison: Comparison, left: float, y: float) -> float:
    """The push on each response: one column a response, prompts side by side; returns where the part ends."""
    count = min(len(comparison.row_scores), _MAX_RESPONSES)
    cut = f"; the first {count} of {len(comparison.row_scores)}" if count < len(comparison.row_scores) else ""
    about = f"the sum of the pushes on each response, those to one prompt together; blue: more likely, red: less likely{cut}"
    y = _heading(page, y, "Responses", about) + 10
    width = max(3.0, min(14.0, math.floor(880 / count)))
    x, places = left, []
    for before, prompt in itertools.pairwise([comparison.row_prompts[0], *comparison.row_prompts[:count]]):
        x += 3.0 if prompt != before else 0.0
        places.append(x)
        x += width
    page.text(left - 8, y + 11, "reward", text_anchor="end", fill=_GREY)
    scores = comparison.row_scores[:count]
    low, high = min(scores), max(scores)
    greys = [(s - low) / ((high - low) or 1.0) for s in scores]
    page.cells(places, [width] * count, greys, y, _STRIP_ROW - 3, _grey)
    y += _STRIP_ROW + 3
    for result in comparison.results:
        page.text(left - 8, y + 11, result.name, text_anchor="end")
        page.cells(places, [width] * count, _scaled(result.row_pushes[:count]), y, _STRIP_ROW - 2, _colour)
        y += _STRIP_ROW
    page.text(left, y + 15, f"reward from {low:g} (white) to {high:g} (black)", fill=_GREY, font_size=11)
    page.widen(x)
    return y + 15


def _draw_excerpts(page: _Page, comparison: Comparison, left: float, y: float) -> float:
    """Pieces of responses, side by side while they fit; returns where the part ends."""
    if not comparison.excerpts:
        return y
    y = _heading(page, y, "Tokens", "the push on each token of responses with strong ones; blue: more likely, red: less likely")
    peaks = [r.largest_push for r in comparison.results]
    x, height = left, 51 + _TOKEN_ROW * len(peaks)
    for excerpt in comparison.excerpts:
        about = f"row {excerpt.row}, reward {excerpt.score:g}: …{excerpt.prompt}"
        shown = [visible(token).replace(" ", "␣") for token in excerpt.tokens]
        widths = [max(_MONO_CHARACTER * _columns(token) + 8, 18) for token in shown]
        width = max(sum(widths) + 36, 6.5 * _columns(about) + 24)
        if x > left and x + width > max(page.width, 1200):
            x, y = left, y + height
        page.text(x, y + 26, about, fill=_GREY, font_size=11)
        names = [r.name for r in comparison.results] if x == left else []
        _draw_excerpt(page, excerpt, x + (12 if excerpt.start else 0), y + 44, shown, widths, names, peaks)
        page.widen(x + width)
        x += width
    return y + height + 24


def _draw_excerpt(
    page: _Page,
    excerpt: Excerpt,
    left: float,
    y: float,
    shown: Sequence[str],
    widths: Sequence[float],
    names: Sequence[str],
    peaks: Sequence[float],
) -> None:
    """One piece: the tokens above, a line for each algorithm below, beginning with its name if names are given."""
    *x, end = itertools.accumulate(widths, initial=left)
    for at, token, width in zip(x, shown, widths, strict=True):
        page.text(at + width / 2, y, token, text_anchor="middle", font_family=_MONO)
    if excerpt.start:
        page.text(left - 2, y, "…", text_anchor="end", font_family=_MONO)
    if excerpt.is_cut:
        page.text(end + 2, y, "…", font_family=_MONO)
    for i, (pushes, peak) in enumerate(zip(excerpt.pushes, peaks, strict=True)):
        top = y + 7 + i * _TOKEN_ROW
        for name in names[i : i + 1]:
            page.text(left - 8, top + 11, name, text_anchor="end")
        page.cells(x, [width - 2 for width in widths], _scaled(pushes, peak), top, _TOKEN_ROW - 2, _colour)


def _heading(page: _Page, y: float, title: str, about: str) -> float:
    page.text(_MARGIN, y, title, font_size=15, font_weight=600)
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
    return "#" + 3 * f"{round(240 - 200 * round(value * _LEVELS) / _LEVELS):02x}"


def _columns(text: str) -> int:
    """How many columns a monospaced font needs."""
    return sum(2 if unicodedata.east_asian_width(c) in "WF" else 0 if unicodedata.combining(c) else 1 for c in text)


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

    def cells(
        self,
        places: Sequence[float],
        widths: Sequence[float],
        values: Sequence[float],
        y: float,
        height: float,
        colour: Callable[[float], str],
    ) -> None:
        """Rectangles on one line, one path for each colour: a few bytes each."""
        paths: dict[str, str] = defaultdict(str)
        for x, width, value in zip(places, widths, values, strict=True):
            paths[colour(value)] += f"M{x:.4g} {y:.4g}h{width:.4g}v{height:.4g}h-{width:.4g}z"
        self._parts += [f'<path fill="{fill}" d="{path}"/>' for fill, path in paths.items()]

    def text(self, x: float, y: float, text: str, *, fill: str = _INK, turn: float = 0.0, **attributes: object) -> None:
        extra = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in attributes.items())
        extra += f' transform="rotate({turn:g} {x:.4g} {y:.4g})"' if turn else ""
        self._parts.append(f'<text x="{x:.4g}" y="{y:.4g}" fill="{fill}"{extra}>{escape(visible(text))}</text>')

    def paragraph(self, y: float, text: str, indent: float = 0.0) -> float:
        """Grey lines at the margin, all but the first moved by `indent`; returns where the next one goes."""
        lines = textwrap.wrap(text, 118, break_long_words=False, break_on_hyphens=False)
        for i, line in enumerate(lines):
            self.text(_MARGIN + (indent if i else 0), y + 17 * i, line, fill=_GREY)
        return y + 17 * len(lines)

    def svg(self, height: float) -> str:
        width, height = math.ceil(self.width + _MARGIN), math.ceil(height + _MARGIN)
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
            f'font-family="{_SANS}" font-size="12">\n<rect width="{width}" height="{height}" fill="#fff"/>\n'
        )
        return head + "\n".join(self._parts) + "\n</svg>\n"
