# ruff: noqa: RUF001  (the characters are meant)
r"""One spelling for the many ways to write the same LaTeX: no layout, one name for each command, braces where TeX lets them out.

`spell` changes how an answer is written, never what it says: units, percent signs, texts and brackets stay, for `structure` to read.
"""

import re
from collections.abc import Callable

from lockstep.utils.characters import to_ascii

_UNICODE = {
    "×": r"\cdot ", "·": r"\cdot ", "⋅": r"\cdot ", "÷": r"\div ", "π": r"\pi ", "∞": r"\infty ", "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ",
    "±": r"\pm ", "∓": r"\mp ", "∪": r"\cup ", "∈": r"\in ", "∅": r"\emptyset ", "°": r"^\circ ", "≈": r"\approx ", "θ": r"\theta ",
    "α": r"\alpha ", "β": r"\beta ", "²": "^2", "³": "^3", "ℝ": r"\mathbb{R}", "½": r"\frac{1}{2}", "¼": r"\frac{1}{4}",
    "¾": r"\frac{3}{4}", "⅓": r"\frac{1}{3}", "⅔": r"\frac{2}{3}", "√": r"\sqrt ", "£": r"\pounds ", "€": r"\euro ",
}  # fmt: skip
_SYNONYMS = {
    r"\frac": "dfrac tfrac cfrac", r"\binom": "dbinom tbinom", r"\le": "leq leqslant", r"\ge": "geq geqslant", r"\cdot": "times ast",
    r"\text": "text textbf textit textrm textnormal textsf texttt mbox hbox mathrm mathsf",
    "": "left right middle big Big bigg Bigg bigl bigr Bigl Bigr biggl biggr displaystyle textstyle limits mathbf mathit boldsymbol"
    " bm rm bf thinspace",
    " ": "quad qquad", "|": "vert lvert rvert", r"\ne": "neq", "<": "lt", ">": "gt", r"^\circ": "degree", r"\emptyset": "varnothing",
    r"\{": "lbrace", r"\}": "rbrace", r"\approx": "simeq", r"\phi": "varphi", ":": "colon", r"\mathbb{R}": "R", r"\lor": "vee",
    r"\land": "wedge", r"\setminus": "backslash",
}  # fmt: skip
_COMMANDS = {command: spelled for spelled, commands in _SYNONYMS.items() for command in commands.split()}
"""Command -> what says the same."""
_FUNCTIONS = "arcsin|arccos|arctan|sin|cos|tan|cot|sec|csc|log|ln|exp|pi|theta|alpha|beta"
_NO_WORD = re.compile(rf"{_FUNCTIONS}|sqrt|gcd|lcm|mod|min|max|det")

_SKIP_TEXT = r"\\text\{[^{}]*\}|"
# Words without \text: at the start or after a value and a blank, with nothing but punctuation behind them.
_WORDS = re.compile(
    _SKIP_TEXT
    + r"(?:^|(?<=[0-9)}%] )|(?<=[,;:(=])|(?<=[,;:(=] ))([a-zA-Z]+(?:[ '/.-]+[a-zA-Z]+)*)\.?(?=\s*(?:$|[,;:)=^]|\\lor|\\cup))"
)
_SHORT_UNIT = re.compile(
    _SKIP_TEXT + r"(?<=[0-9}])\s*(cm|mm|km|kg|mg|mL|ml|ft|lbs?|oz|hrs?|mph|[ap]\.?m\.?)(?=\s*(?:$|[,;^]))", re.IGNORECASE
)
_POWER_OF_TEN = re.compile(
    r"(?<![0-9a-zA-Z.\\])([0-9]+\.[0-9]+|[0-9]+(?=[eE](?:[0-9]|[-+][0-9]{2})))[eE]\+?(-?[0-9]{1,3})(?![0-9a-zA-Z.])"
)
"""5.4e+01, 1e5, 2e-03; not 2e+3, which is 3 more than 2e."""
_THOUSANDS = r"[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])"
_FRACTION_OR_ROOT = re.compile(r"\\(frac|sqrt|binom)(?![a-zA-Z])")
_ARGUMENT = re.compile(r"\s*(\\[a-zA-Z]+|[^\s}\\])")


def spell(answer: str) -> str:
    """The answer in the spelling that `structure.parse` reads."""
    text = re.sub(r"\s", " ", to_ascii(answer).replace("\0", ""))
    for character, command in _UNICODE.items():
        text = text.replace(character, command)
    # Thousands that cannot be anything else: 1{,}000, 1,\!000 and 1\,000.
    text = re.sub(r"(?<=[0-9])(?:\{,\}|,\\!|\\!,|\\,)(?=[0-9]{3}(?![0-9]))", "", text)
    text = re.sub(r"(?<!\\)\\!|(?<!\\)\$|(?<!\\)\\[()\[\]]|\\(?:left|right)\s*\.", "", text)
    text = re.sub(r"(?<!\\)\\[,;: ]|(?<!\\)~", " ", text)
    text = re.sub(r"\\([a-zA-Z]+)", lambda m: _COMMANDS.get(m[1], m[0]), text)
    if (whole := re.fullmatch(r"\s*\\text\s*(\{.*[\\^].*\})\s*", text)) and closing_braces(whole[1]).get(0) == len(whole[1]) - 1:
        text = whole[1][1:-1]  # a formula, not words
    text = _POWER_OF_TEN.sub(r"\1\\cdot 10^{\2}", text)
    text = re.sub(r"\\?%", r"\\%", text)
    text = re.sub(r"\^\s*\{\s*\\circ\s*\}|\^\s*\\circ(?![a-zA-Z])", r"^\\circ ", text)
    text = re.sub(r"\\text\s*\{([^{}]*)\}", _spell_text, text)
    text = _spell_operators(text)
    text = _SHORT_UNIT.sub(lambda m: m[0] if m[1] is None else rf"\text{{{m[1]}}}", text)
    text = _WORDS.sub(_wrap_words, text)
    text = brace_arguments(text)
    text = re.sub(r"([_^])\s*\{\s*([0-9a-zA-Z])\s*\}", r"\1\2", text)
    return _join_thousands(re.sub(r" +", " ", text).strip().rstrip(".,; "))


def _spell_text(match: re.Match[str]) -> str:
    r"""\text{...} cut at its commas and its "and"s and "or"s, so that it lists what a list outside of it would; only words stay in it."""
    pieces = re.split(r"(,(?![0-9]{3})|;|\band\b|\bor\b)", match[1])
    return "".join((r"\lor " if piece == "or" else ", ") if i % 2 else _spell_words(piece) for i, piece in enumerate(pieces))


def _spell_words(piece: str) -> str:
    if not re.search("[a-zA-Z]", piece) or re.search(r"[=<>^\\]", piece):
        return piece
    quantity = re.fullmatch(r"\s*(-?[0-9][0-9.,/]*)\s+([a-zA-Z][a-zA-Z .]*)", piece)
    return rf"{quantity[1]} \text{{{quantity[2]}}}" if quantity else rf"\text{{{piece.strip()}}}"


def _spell_operators(text: str) -> str:
    for written, spelled in ((r"<=|=<", r"\le "), (r">=", r"\ge "), (r"\*", r"\cdot ")):
        text = re.sub(written, spelled.replace("\\", r"\\"), text)
    text = re.sub(r"(?<=[)\]])\s*U\s*(?=[(\[])", r"\\cup ", text)
    text = re.sub(r"(?<![\\a-zA-Z])sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}", text)
    text = re.sub(_SKIP_TEXT + r"(?<![\\a-zA-Z])(infinity|inf)(?![a-zA-Z])", _unless_text(lambda _: r"\infty "), text)
    text = re.sub(rf"{_SKIP_TEXT}(?<![\\a-zA-Z{{])({_FUNCTIONS})(?![a-zA-Z}}])", _unless_text(lambda m: rf"\{m[1]} "), text)
    text = re.sub(
        _SKIP_TEXT + r",?\s*(?<![\\a-zA-Z])(and|or)(?![a-zA-Z])", _unless_text(lambda m: r"\lor " if m[1] == "or" else ", "), text
    )
    # "1, 2, or 3" lists three.
    return re.sub(r"(?:,\s*)+(?=\\lor)|(?<=\\lor )\s*(?:,|\\lor\s)\s*|,\s*(?=,)", "", text)


def _unless_text(replacement: Callable[[re.Match[str]], str]) -> Callable[[re.Match[str]], str]:
    return lambda match: match[0] if match[0].startswith(r"\text{") else replacement(match)


def _wrap_words(match: re.Match[str]) -> str:
    words = re.findall("[a-zA-Z]+", match[1] or "")
    if any(len(word) >= 3 and not _NO_WORD.fullmatch(word) for word in words):
        return rf"\text{{{match[1]}}}"
    return match[0]


def _join_thousands(text: str) -> str:
    """1,000 is one number where nothing else in the answer needs the comma, and in a list with blanks after its commas."""
    if re.search(r",\s", text):
        return re.sub(rf"(?<![0-9.,]){_THOUSANDS}", lambda m: m[0].replace(",", ""), text)
    only = re.fullmatch(rf"([^,0-9(\[{{]*)({_THOUSANDS})((?:\.[0-9]+)?[^,]*)", text)
    return only[1] + only[2].replace(",", "") + only[3] if only else text


def brace_arguments(text: str) -> str:
    r"""Write \frac12 as \frac{1}{2} and \sqrt2 as \sqrt{2}; works at any depth, in one pass."""
    closing = closing_braces(text)
    braces: list[tuple[int, str]] = []
    for command in _FRACTION_OR_ROOT.finditer(text):
        position = command.end()
        if text.startswith("[", position):  # the degree of a root
            position = text.find("]", position) + 1
            if not position:
                continue
        num_arguments = 1 if command[1] == "sqrt" else 2
        for _ in range(num_arguments):
            argument = _ARGUMENT.match(text, position)
            if argument is None:
                break
            if argument[1] == "{":
                if argument.start(1) not in closing:
                    break
                position = closing[argument.start(1)] + 1
            else:
                braces += [(argument.start(1), "{"), (argument.end(1), "}")]
                position = argument.end()
    pieces = []
    done = 0
    for position, brace in sorted(braces, key=lambda b: b[0]):
        pieces += [text[done:position], brace]
        done = position
    return "".join(pieces) + text[done:]


def closing_braces(text: str) -> dict[int, int]:
    r"""Position of each opening brace that is closed -> position of its closing brace; \{ and \} are characters."""
    closing = {}
    opened = []
    for token in re.finditer(r"\\.|[{}]", text, re.DOTALL):
        if token[0] == "{":
            opened.append(token.start())
        elif token[0] == "}" and opened:
            closing[opened.pop()] = token.start()
    return closing
