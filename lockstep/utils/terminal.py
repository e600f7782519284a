"""Text that files, models, rewards and users wrote, made safe for a terminal or a log."""

import sys
import unicodedata

_UNESCAPED = "\n\t"
_ESCAPED = ("Cc", "Cf", "Cs", "Zl", "Zp")
"""Categories of characters: control, format (also those that turn the direction of writing), surrogates, separators of lines."""


def printable(text: str) -> str:
    """Return the text with control characters escaped (`\\x1b`), so that it moves no cursor, clears no screen and hides nothing.

    New lines and tabs stay.
    """
    if text.isascii() and text.replace("\n", "").replace("\t", "").isprintable():
        return text
    return "".join(c if c in _UNESCAPED or unicodedata.category(c) not in _ESCAPED else ascii(c)[1:-1] for c in text)


def say(text: object, *, is_error: bool = False, flush: bool = False) -> None:
    """Print the text to stdout, or to stderr, with control characters escaped: it may quote files, models, rewards and users."""
    print(printable(str(text)), file=sys.stderr if is_error else sys.stdout, flush=flush)
