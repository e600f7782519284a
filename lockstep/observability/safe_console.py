"""A console of Rich that escapes control characters: tables and live views quote files, models and rewards."""

from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.segment import Segment

from lockstep.utils.terminal import printable


class SafeConsole(Console):
    """Prints as Rich does; the text itself moves no cursor, sets no title and hides nothing."""

    def render(self, renderable: Any, options: Any = None) -> Iterable[Segment]:
        """Return the segments, with the control characters of texts escaped; Rich's own control codes stay."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)
