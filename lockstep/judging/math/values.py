r"""Values of answers: what is left when lists, brackets and relations are taken off. `2\sqrt{3}\text{ cm}` is a value with a unit.

`Comparator` decides whether two values are the same by their spelling and as exact fractions. Where algebra is needed it raises Undecided;
`symbolic` has the judge that does it.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction


class Undecided(Exception):
    """Two values can only be compared by algebra."""


@dataclass(frozen=True)
class Leaf:
    """One value as spelled, without its unit."""

    value: str
    unit: str = ""
    """As `_unit` writes it; "" where none is written."""


_UNITS = """
    cm centimeter centimetre, mm millimeter millimetre, m meter metre, km kilometer kilometre, in inch inche, ft foot feet,
    yd yard, mi mile, g gram, kg kilogram, mg milligram, lb pound, oz ounce, s sec second, min minute, h hr hour, day, week,
    month, year yr, l liter litre, ml milliliter millilitre, gal gallon, mph, dollar usd, cent ¢, percent percentage pct,
    degree deg, rad radian, am, pm
"""
"""The spellings of each unit; the first is its name."""
_UNIT_NAMES = {word: unit.split()[0] for unit in _UNITS.split(",") for word in unit.split()}
_SUFFIX = re.compile(
    r"(?P<percent>\\%)\s*$|(?P<degree>\^\\circ)\s*(?:\\text\{[CF]\}|[CF])?\s*$|\\text\{(?P<text>[^{}]*)\}\s*(?:\^\s*\{?(?P<power>[0-9])\}?)?\s*$"
)
_PREFIX = re.compile(r"\s*([-+]?)\s*(\\\$|\\pounds|\\euro)\s*")
_CURRENCIES = {r"\$": "dollar", r"\pounds": "pound sterling", r"\euro": "euro"}


def read_leaf(text: str) -> Leaf:
    """A spelled value and its unit. A text behind a value is its unit, with or without a power; any other text is a value."""
    unit = ""
    prefix = _PREFIX.match(text)
    if prefix:
        unit = _CURRENCIES[prefix[2]]
        text = prefix[1] + text[prefix.end() :]
    suffix = _SUFFIX.search(text)
    value = text[: suffix.start()].strip() if suffix else ""
    is_argument = suffix is not None and suffix["degree"] and re.search(r"\\(?:sin|cos|tan|cot|sec|csc)", value)
    if suffix and re.search(r"[0-9a-zA-Z)}|!]$", value) and not re.search(r"\\text\{[^{}]*\}$", value) and not is_argument:
        unit = unit or _unit(suffix)
        text = value
    return Leaf(_close_up(text), unit)


def _unit(suffix: re.Match[str]) -> str:
    """A known unit by its name and power ("cm^2"), "?" for any other text."""
    if suffix["percent"] or suffix["degree"]:
        return "percent" if suffix["percent"] else "degree"
    words = re.findall("[a-z¢]+", suffix["text"].casefold().replace(".", ""))
    power = {"square": 2, "sq": 2, "squared": 2, "cubic": 3, "cu": 3, "cubed": 3}
    powers = [power[word] for word in words if word in power] + [int(suffix["power"] or 1)]
    names = [word for word in words if word not in power]
    name = next((n for word in names[:1] for n in (_UNIT_NAMES.get(word), _UNIT_NAMES.get(word.removesuffix("s"))) if n), None)
    if name is None or len(names) > 1:
        return "?"
    return name if max(powers) == 1 else f"{name}^{max(powers)}"


def _close_up(text: str) -> str:
    """Without blanks, but for those that end a command's name or part two numbers."""
    text = re.sub(r"(\\[a-zA-Z]+) +(?=[a-zA-Z])|(?<=[0-9]) +(?=[0-9])", lambda m: (m[1] or "") + "\0", text.strip())
    return text.replace(" ", "").replace("\0", " ").removeprefix("+")


_DECIMAL = r"[0-9]+(?:\.[0-9]+)?|\.[0-9]+"
_NUMBER_FORMS: list[tuple[re.Pattern[str], Callable[..., Fraction]]] = [
    (re.compile(rf"({_DECIMAL})\.?"), Fraction),
    (re.compile(rf"\\frac\{{(-?(?:{_DECIMAL}))\}}\{{(-?(?:{_DECIMAL}))\}}"), lambda a, b: Fraction(a) / Fraction(b)),
    (re.compile(rf"({_DECIMAL})/({_DECIMAL})"), lambda a, b: Fraction(a) / Fraction(b)),
    (re.compile(r"([0-9]+)\\frac\{([0-9]+)\}\{([0-9]+)\}"), lambda a, b, c: int(a) + Fraction(int(b), int(c))),
    (re.compile(r"([0-9]+) ([0-9]+)/([0-9]+)"), lambda a, b, c: int(a) + Fraction(int(b), int(c))),
    (re.compile(r"([1-9][0-9]*):([1-9][0-9]*)"), lambda a, b: Fraction(int(a), int(b))),
    (re.compile(r"([0-9]{1,3}(?: [0-9]{3})+)"), lambda a: Fraction(a.replace(" ", ""))),
    (
        re.compile(r"([0-9]*)\.([0-9]*)\\overline\{?([0-9]+)\}?"),
        lambda a, b, c: Fraction(int(a + b + c) - int((a + b) or 0), 10 ** len(b) * (10 ** len(c) - 1)),
    ),
    (
        re.compile(rf"({_DECIMAL})(?:\\cdot|[ ])+10\^(?:\{{(-?[0-9]{{1,3}})\}}|([0-9]))"),
        lambda a, b, c: Fraction(a) * Fraction(10) ** int(b or c),
    ),
]


def number(value: str) -> Fraction | None:
    """The number that a spelled value writes out, exactly; None for anything that would have to be computed."""
    sign, rest = (-1, value[1:]) if value.startswith("-") else (1, value)
    for form, convert in _NUMBER_FORMS:
        match = form.fullmatch(rest)
        if match:
            try:
                return sign * convert(*(group or "" for group in match.groups()))
            except (ZeroDivisionError, ValueError):
                return None
    return None


class Comparator:
    """Decides about two values by their spelling and as exact fractions."""

    def leaf(self, answer: Leaf, truth: Leaf) -> bool:
        """Whether two values are the same. Raises Undecided when only algebra can tell."""
        if answer.unit and truth.unit and "?" not in (answer.unit, truth.unit) and answer.unit != truth.unit:
            return False
        if not answer.value or not truth.value:
            return False
        is_time = not {"am", "pm"}.isdisjoint((answer.unit, truth.unit))
        a = number(answer.value)
        b = number(truth.value)
        if a is not None and b is not None and not is_time:
            return (
                a == b
                or (answer.unit == "percent" != truth.unit and a / 100 == b)
                or (truth.unit == "percent" != answer.unit and a == b / 100)
            )
        if answer.value == truth.value:
            return True
        if ":" in answer.value + truth.value:  # a time or a ratio of three; the parser would divide
            return False
        if _is_text(answer.value) or _is_text(truth.value):
            said = _said(answer.value)
            return said is not None and said == _said(truth.value)
        if _VARIABLE.fullmatch(answer.value) and _VARIABLE.fullmatch(truth.value):
            return False
        if _NUMERAL.fullmatch(answer.value) or _NUMERAL.fullmatch(truth.value):
            return _numeral(answer.value) == _numeral(truth.value)
        return self.expressions(answer.value, truth.value)

    def expressions(self, answer: str, truth: str) -> bool:
        """Whether two expressions are equal for all values of their variables."""
        raise Undecided

    def relations(self, sign: str, answer: tuple[str, str], truth: tuple[str, str]) -> bool:
        """Whether two relations with the same sign, given by their sides, hold for the same values of their variables."""
        raise Undecided


_VARIABLE = re.compile("[a-zA-Z]")
_NUMERAL = re.compile(r"([0-9A-Z]+)_(?:\{?([0-9]+)\}?|\{?\\text\{([a-z]+)\}\}?)")
_BASES = {"two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9, "ten": 10, "sixteen": 16}


def _numeral(value: str) -> tuple[str, int] | None:
    match = _NUMERAL.fullmatch(value)
    if match is None:
        return None
    return match[1].lstrip("0"), int(match[2]) if match[2] else _BASES.get(match[3], 0)


def _is_text(value: str) -> bool:
    return re.fullmatch(r"\\text\{[^{}]*\}", value) is not None


def _said(value: str) -> str | None:
    """What a text says, in lower case without punctuation; one letter keeps its case. None where there are commands or braces."""
    words = value.removeprefix(r"\text{").removesuffix("}") if _is_text(value) else value
    said = re.sub(r"[^\w:/]", "", words)
    return None if re.search(r"[\\{}]", words) else said if len(said) == 1 else said.casefold()
