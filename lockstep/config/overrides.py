"""Arguments of the form `key=value`.

The key is names joined by dots; verl's `+` and `++` before it change nothing, and `~key` deletes. What stands behind the first `=` is

| value | read as |
|---|---|
| `null`, `true`, `false` | that, in any case |
| `12`, `-3`, `1_000` | a whole number |
| `0.5`, `.5`, `1e-6`, `inf`, `nan` | a number |
| `'text'`, `"text"` | text; a backslash before the same quote keeps it |
| `[a, b]` | a list of values |
| `{a: 1, b: x}` | a dict, whose keys are text |
| anything else | text, as it stands: `~/x`, `lr=1e-6,x(1).parquet`, `data/*.parquet`, `${trainer.seed}` |

In a list or a dict, text ends at a comma, a closing bracket, and (as a key) a colon; put it in quotes where it has these.
"""

import re
from dataclasses import dataclass
from typing import Any

from lockstep.errors import ConfigError

_KEY = re.compile(r"[+]{0,2}([^\s=+~'\"\[\]{}][^\s='\"\[\]{}]*)")
_INTEGER = re.compile(r"[+-]?(0|[1-9][0-9]*(_[0-9]+)*)")
_NUMBER = re.compile(r"[+-]?(([0-9]+\.[0-9]*|\.[0-9]+)(e[+-]?[0-9]+)?|[0-9]+e[+-]?[0-9]+|inf|nan)", re.IGNORECASE)
_WORDS = {"null": None, "true": True, "false": False}
_PAIRS = {"[": "]", "{": "}"}
_MAX_DEPTH = 50


@dataclass(frozen=True)
class Override:
    """An argument: `value` of `key`, or its deletion."""

    key: str
    value: Any
    is_delete: bool = False
    is_several: bool = False
    """Whether the value is bare text with commas, which may have been meant as a list."""


def parse_override(text: str) -> Override:
    """Return what the argument says. Raises ConfigError if it is not key=value, or a quote or a bracket is not closed."""
    if text.startswith("~"):
        key, _, value = text[1:].partition("=")
        return Override(key.strip(), value or None, is_delete=True)
    key, equals, value = text.partition("=")
    name = _KEY.fullmatch(key.strip())
    if not equals or name is None:
        raise ConfigError(f"cannot read '{text}': expected key=value")
    value = value.strip()
    read = parse_value(value, text)
    is_several = isinstance(read, str) and read == value and "," in value
    return Override(name[1], read, is_several=is_several)


def parse_value(text: str, argument: str | None = None) -> Any:
    """Return the value that the text stands for. Raises ConfigError, which quotes the `argument`, as `parse_override` does."""
    text = text.strip()
    if text[:1] not in ("'", '"', "[", "{") or not text:
        return _scalar(text)
    reader = _Reader(text, text if argument is None else argument)
    value = reader.value(())
    reader.skip_blanks()
    if reader.at < len(text):
        raise reader.error(f"after {text[: reader.at]!r} nothing may follow, but there is {text[reader.at :]!r}")
    return value


def _scalar(text: str) -> Any:
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    if _INTEGER.fullmatch(text):
        return int(text)
    return float(text) if _NUMBER.fullmatch(text) else text


class _Reader:
    """Reads quotes, lists and dicts from left to right."""

    def __init__(self, text: str, argument: str) -> None:
        self.text = text
        self._argument = argument
        self.at = 0
        self._depth = 0

    def error(self, why: str) -> ConfigError:
        return ConfigError(
            f"cannot read '{self._argument}': {why}; put a text with quotes, commas or brackets in quotes: key='\"[a\"'"
        )

    def skip_blanks(self) -> None:
        while self.at < len(self.text) and self.text[self.at].isspace():
            self.at += 1

    def value(self, ends: tuple[str, ...]) -> Any:
        """The value from here up to one of the characters `ends`, which is not taken."""
        self.skip_blanks()
        first = self.text[self.at : self.at + 1]
        if first in ("'", '"') and first:
            return self._quoted(first)
        if first not in _PAIRS:
            return _scalar(self._bare(ends))
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise self.error("it is nested too deep")
        found = self._list() if first == "[" else self._dict()
        self._depth -= 1
        return found

    def _quoted(self, quote: str) -> str:
        end = re.compile(rf"(?:[^\\{quote}]|\\.)*{quote}", re.DOTALL).match(self.text, self.at + 1)
        if end is None:
            raise self.error(f"the quote {quote} is not closed")
        inner = self.text[self.at + 1 : end.end() - 1]
        self.at = end.end()
        # Backslashes count only before a quote or the end, where each pair is one.
        return re.sub(rf"(\\+)(?={quote}|\Z)", lambda found: "\\" * (len(found[1]) // 2), inner)

    def _bare(self, ends: tuple[str, ...]) -> str:
        """Text without quotes; an interpolation ${...} in it may have any character."""
        start = self.at
        while self.at < len(self.text) and self.text[self.at] not in ends:
            if self.text.startswith("${", self.at):
                close = self.text.find("}", self.at)
                if close < 0:
                    raise self.error("${ is not closed")
                self.at = close
            elif self.text[self.at] in "[]{}'\"":
                raise self.error(f"{self.text[self.at]!r} stands within a text")
            self.at += 1
        return self.text[start : self.at].strip()

    def _list(self) -> list[Any]:
        found: list[Any] = []
        while not self._closes("]", bool(found)):
            found.append(self.value((",", "]")))
        return found

    def _dict(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        while not self._closes("}", bool(found)):
            self.skip_blanks()
            quote = self.text[self.at : self.at + 1]
            key = self._quoted(quote) if quote in ("'", '"') and quote else self._bare((":", ",", "}"))
            self.skip_blanks()
            if self.text[self.at : self.at + 1] != ":":
                raise self.error(f"the key {key!r} of a dict has no value; a dict is {{a: 1, b: 2}}")
            self.at += 1
            found[key] = self.value((",", "}"))
        return found

    def _closes(self, bracket: str, has_some: bool) -> bool:
        """Pass the opening bracket, or the comma between two values; whether the closing bracket came instead."""
        opening = not has_some
        if opening:
            self.at += 1
        self.skip_blanks()
        here = self.text[self.at : self.at + 1]
        if here == bracket:
            self.at += 1
            return True
        if not here:
            raise self.error(f"the bracket {bracket} is missing")
        if not opening:
            if here != ",":
                raise self.error(f"expected a comma or {bracket} before {self.text[self.at :]!r}")
            self.at += 1
        return False


def override_text(value: Any) -> str:
    """The text of a value, which `parse_value` reads as the same value."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list | tuple):
        return f"[{','.join(map(override_text, value))}]"
    if isinstance(value, dict):
        return f"{{{','.join(f'{_key_text(str(key))}:{override_text(entry)}' for key, entry in value.items())}}}"
    if not isinstance(value, str):
        return str(value)
    is_plain = re.fullmatch(r"[\w./@%+-]+(:[\w./@%+-]+)*", value) and _scalar(value) == value
    return value if is_plain else _in_quotes(value)


def _key_text(key: str) -> str:
    return key if re.fullmatch(r"[\w./@%+*-]+", key) else _in_quotes(key)


def _in_quotes(text: str) -> str:
    return "'" + re.sub(r"(\\*)('|\Z)", lambda found: found[1] * 2 + ("\\'" if found[2] else ""), text) + "'"
