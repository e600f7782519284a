"""Characters that people and models write for the same thing, as the ASCII ones that the rules look for."""

_FULL_WIDTH = {code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F)}
_MINUS_SIGNS = dict.fromkeys(map(ord, "\u2010\u2011\u2012\u2013\u2014\u2212\ufe63"), "-")
_SPACES = dict.fromkeys((0xA0, *range(0x2000, 0x200B), 0x202F, 0x205F, 0x3000), " ")
_INVISIBLE = dict.fromkeys((0x200B, 0x200C, 0x200D, 0x2060, 0xFEFF), None)
_QUOTES = {0x2018: "'", 0x2019: "'", 0x201C: '"', 0x201D: '"'}
_TABLE: dict[int, int | str | None] = {**_FULL_WIDTH, **_MINUS_SIGNS, **_SPACES, **_INVISIBLE, **_QUOTES}


def to_ascii(text: str) -> str:
    """The text with full-width forms, dashes, special spaces and curly quotes as ASCII; other characters stay."""
    return text.translate(_TABLE)
