r"""What an answer is made of: lists, pairs, intervals, matrices, relations, and values with units; and when two of them are the same.

```text
"x = 1 \text{ or } 2\sqrt3 \text{ cm}"  --spell-->  --parse-->  Group("list", (1, 2\sqrt{3} [cm]))
equal(answer, truth, comparator): same groups, same order unless order means nothing, and `comparator` decides about pairs of values
```

Brackets mean what they say: (1,2), [1,2] and \{1,2\} are three answers. A list has no order.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lockstep.judging.math.values import Comparator, Leaf, read_leaf

_MAX_DEPTH = 8
_MAX_UNORDERED = 30


@dataclass(frozen=True)
class Group:
    """Several parts. `kind`: "list" and "union" (no order), brackets such as "[)", "matrix 2" or "det 2" (with the number of columns),
    or the relation signs between the parts, such as "<" and "< <=".
    """

    kind: str
    items: tuple[Node, ...]


Node = Leaf | Group

_RELATIONS = {"=": "=", "<": "<", ">": ">", r"\le": "<=", r"\ge": ">=", r"\ne": "!=", r"\approx": "~", r"\in": "in"}
_MIRRORED = {">": "<", ">=": "<="}
_UNORDERED = ("list", "union")
_INTERVALS = ("()", "(]", "[)", "[]")
_REALS = Group("()", (Leaf(r"-\infty"), Leaf(r"\infty")))
_NAMES: tuple[tuple[str, Node], ...] = (
    (r"\\mathbb\{r\}|\\text\{all real(s| numbers?)\}", _REALS),
    (r"\\text\{(no (real )?solutions?|empty set)\}", Leaf(r"\emptyset")),
    (r"\\text\{infinity\}", Leaf(r"\infty")),
)
"""Pattern of what is written in words -> what it says."""

# -- reading ----------------------------------------------------------------------------------------------------------------------

_TOKEN = re.compile(r"\\begin\{[a-zA-Z]+\*?\}|\\end\{[a-zA-Z]+\*?\}|\\text\{[^{}]*\}|\\[a-zA-Z]+|\\.|.", re.DOTALL)
_OPENING = {"(": "(", "[": "[", "{": "{", r"\{": r"\{", r"\langle": "<"}
_CLOSING = {")": ")", "]": "]", "}": "}", r"\}": r"\}", r"\rangle": ">"}


def parse(text: str, depth: int = _MAX_DEPTH) -> Node:
    """Read what `spell` wrote. Deeper than eight brackets is not taken apart."""
    text = text.strip().rstrip(".,; ")
    if depth == 0:
        return read_leaf(text)
    parts, signs = _split(text, (",", ";", r"\lor"))
    if len(parts) > 1:
        return _list([parse(part, depth - 1) for part in parts], is_union=all(sign == r"\lor" for sign in signs))
    parts, _ = _split(text, (r"\cup",))
    if len(parts) > 1:
        return Group("union", tuple(parse(part, depth - 1) for part in parts))
    parts, signs = _split(text, tuple(_RELATIONS))
    if len(parts) > 1:
        return _relation([parse(part, depth - 1) for part in parts], [_RELATIONS[sign] for sign in signs])
    named = next((node for words, node in _NAMES if re.fullmatch(words, text, re.IGNORECASE)), None)
    return _enclosed(text, depth) or _plus_minus(text, depth) or named or read_leaf(text)


def _enclosed(text: str, depth: int) -> Node | None:
    """A set, a pair, an interval or a matrix; None when no pair of brackets goes around the whole text."""
    tokens = list(_TOKEN.finditer(text))
    depths = list(itertools.accumulate(_step(token[0]) for token in tokens))
    if len(tokens) < 2 or min(depths[:-1]) <= 0 or depths[-1] > 0:
        return None
    opening = tokens[0][0]
    closing = tokens[-1][0]
    inner = text[tokens[0].end() : tokens[-1].start()]
    if opening.startswith(r"\begin"):
        return _matrix(opening, inner, depth)
    if opening == r"\{":
        condition, _ = _split(inner, (r"\mid", "|", ":"))
        if not inner.strip():
            return Leaf(r"\emptyset")
        return parse(condition[-1], depth - 1) if len(condition) == 2 else parse(inner, depth - 1)
    if opening == "{":
        return parse(inner, depth - 1) if inner.strip() else None
    items, _ = _split(inner, (",", ";"))
    if len(items) > 1:
        return Group(_OPENING[opening] + _CLOSING.get(closing, closing), tuple(parse(item, depth - 1) for item in items))
    return parse(inner, depth - 1) if opening == "(" and closing == ")" and inner.strip() else None


def _matrix(begin: str, inner: str, depth: int) -> Node | None:
    name = begin.removeprefix(r"\begin{").removesuffix("}").rstrip("*")
    if name == "array":
        inner = re.sub(r"^\s*\{[^{}]*\}", "", inner)
    elif not name.endswith("matrix"):
        return None
    rows = [_split(row, ("&",))[0] for row in _split(inner, (r"\\",))[0]]
    rows = [row for row in rows if any(cell.strip() for cell in row)]
    if not rows or len({len(row) for row in rows}) > 1:
        return None
    cells = tuple(parse(cell, depth - 1) for row in rows for cell in row)
    return Group(f"{'det' if name == 'vmatrix' else 'matrix'} {len(rows[0])}", cells)


def _plus_minus(text: str, depth: int) -> Node | None:
    def branch(upper: str, lower: str) -> Node:
        signed = re.sub(r"\\mp(?![a-zA-Z])", lower, re.sub(r"\\pm(?![a-zA-Z])", upper, text))
        return parse(re.sub(r"^\s*\+", "", signed), depth - 1)

    return Group("list", (branch("+", "-"), branch("-", "+"))) if re.search(r"\\(pm|mp)(?![a-zA-Z])", text) else None


def _list(items: list[Node], is_union: bool) -> Node:
    """Lists in lists are one list; x=1, x=2 and x=1,2 give 1, 2; x<1 or x>3 is a union."""
    if is_union:
        intervals = [as_interval(item) for item in items]
        if all(interval is not None for interval in intervals):
            return Group("union", tuple(interval for interval in intervals if interval is not None))
    first = items[0]
    if isinstance(first, Group) and first.kind == "=" and _is_name(first.items[0]):
        name = first.items[0]
        values = [_assigned(item, name) for item in items]
        if all(value is not None for value in values):
            items = [value for value in values if value is not None]
    flat = itertools.chain.from_iterable(
        item.items if isinstance(item, Group) and item.kind == "list" else (item,) for item in items
    )
    written = tuple(item for item in flat if item != Leaf(""))
    return Group("list", written) if len(written) > 1 else written[0] if written else Leaf("")


def _assigned(item: Node, name: Node) -> Node | None:
    """5 for x=5 and for a bare 5, with x the name; None for another relation. x_1=5 is read as x=5."""
    if not (isinstance(item, Group) and item.kind.split()[0] in _RELATIONS.values()):
        return item
    same = isinstance(name, Leaf) and isinstance(item.items[0], Leaf) and _base_name(item.items[0].value) == _base_name(name.value)
    return item.items[-1] if item.kind == "=" and same else None


def _base_name(name: str) -> str:
    return re.sub(r"_([0-9]|\{[0-9]+\})$", "", name)


def _relation(parts: list[Node], signs: list[str]) -> Node:
    if signs == ["in"]:
        return parts[1]
    if signs[-1] == "~":  # an exact value beside its approximation; a name beside its value
        return Group("=", (parts[0], parts[-1])) if _is_name(parts[0]) else parts[0]
    if set(signs) <= {">", ">="}:
        parts = parts[::-1]
        signs = [_MIRRORED[sign] for sign in signs[::-1]]
    if set(signs) == {"="}:
        is_reversed = _is_name(parts[-1]) and not _is_name(parts[0])
        parts = [parts[-1], parts[0]] if is_reversed else [parts[0], parts[-1]]
        signs = ["="]
        if isinstance(parts[1], Group) and parts[1].kind == "list" and _is_name(parts[0]):  # x = 1 \pm 2
            return parts[1]
    return Group(" ".join(signs), tuple(parts))


def _split(text: str, separators: Sequence[str]) -> tuple[list[str], list[str]]:
    """The parts of the text between separators that no bracket encloses, and those separators."""
    parts = []
    signs = []
    depth = 0
    start = 0
    for token in _TOKEN.finditer(text):
        depth += _step(token[0])
        if depth <= 0 and token[0] in separators:
            parts.append(text[start : token.start()])
            signs.append(token[0])
            start = token.end()
    return [*parts, text[start:]], signs


def _step(token: str) -> int:
    if token in _OPENING or token.startswith(r"\begin"):
        return 1
    return -1 if token in _CLOSING or token.startswith(r"\end") else 0


# -- names ----------------------------------------------------------------------------------------------------------------------------

_NAME = re.compile(
    r"(?:[a-zA-Z]|\\(?!pi|infty|emptyset)[a-zA-Z]+|\\text\{[^{}]*\})'*(?:_(?:\w|\{[^{}]*\}))?(?:\^\{-1\})?(?:\([^()]*\))?"
)


def _is_name(node: Node) -> bool:
    r"""x, x_1, f(x), \theta, \text{Area}; or a pair of names."""
    if isinstance(node, Group):
        return node.kind == "()" and all(map(_is_name, node.items))
    return _NAME.fullmatch(node.value) is not None


def _is_label(node: Node) -> bool:
    """Whether the right side of `node = ...` is the answer on its own: a name, a computation, a term in several unknowns. Not 2x."""
    if _is_name(node) or isinstance(node, Group):
        return _is_name(node)
    letters = re.findall("[a-zA-Z]", re.sub(r"\\[a-zA-Z]+", "", node.value))
    return not letters or len(set(letters)) > 1


# -- comparing --------------------------------------------------------------------------------------------------------------------------


def equal(answer: Node, truth: Node, comparator: Comparator) -> bool:
    """Whether an answer says what the truth says. Raises what the comparator raises."""
    if answer == truth and answer != Leaf(""):
        return True
    answer, truth = _opened(answer, truth, _is_label), _opened(truth, answer, _is_name)
    answer, truth = _like(answer, truth), _like(truth, answer)
    if isinstance(answer, Leaf) and isinstance(truth, Leaf):
        return comparator.leaf(answer, truth)
    if isinstance(answer, Leaf) or isinstance(truth, Leaf):
        return _equal_to_group(answer, truth, comparator)
    if answer.kind != truth.kind or len(answer.items) != len(truth.items):
        return False
    if answer.kind in _UNORDERED:
        return _equal_in_some_order(answer.items, truth.items, comparator)
    if all(equal(a, b, comparator) for a, b in zip(answer.items, truth.items, strict=True)):
        return True
    sides = [item.value for item in (*answer.items, *truth.items) if isinstance(item, Leaf)]
    if answer.kind in ("=", "!=", "<", "<=") and len(sides) == 4:
        return comparator.relations(answer.kind, (sides[0], sides[1]), (sides[2], sides[3]))
    return False


def _equal_to_group(answer: Node, truth: Node, comparator: Comparator) -> bool:
    """A value is no group, but a matrix may be written as a computation with matrices."""
    written = [_latex(node) for node in (answer, truth)]
    if None not in written and all(r"\begin" in str(text) for text in written):
        return comparator.expressions(str(written[0]), str(written[1]))
    return False


def _latex(node: Node) -> str | None:
    if isinstance(node, Leaf):
        return node.value
    kind, _, num_columns = node.kind.partition(" ")
    cells = [cell.value for cell in node.items if isinstance(cell, Leaf)]
    if kind != "matrix" or len(cells) < len(node.items):
        return None
    rows = [cells[i : i + int(num_columns)] for i in range(0, len(cells), int(num_columns))]
    return r"\begin{pmatrix}" + r"\\".join("&".join(row) for row in rows) + r"\end{pmatrix}"


def _equal_in_some_order(answers: Sequence[Node], truths: Sequence[Node], comparator: Comparator) -> bool:
    """Each answer takes the first truth it equals; what is written alike goes first, and spares the comparator."""
    answers = list(answers)
    remaining = list(truths)
    for item in list(answers):
        if item in remaining:
            remaining.remove(item)
            answers.remove(item)
    if len(remaining) > _MAX_UNORDERED:
        return all(equal(a, b, comparator) for a, b in zip(answers, remaining, strict=True))
    for item in answers:
        match = next((truth for truth in remaining if equal(item, truth, comparator)), None)
        if match is None:
            return False
        remaining.remove(match)
    return True


def _opened(node: Node, other: Node, opens: Callable[[Node], bool]) -> Node:
    """5 for x = 5 (where it `opens` with x) beside what is no relation."""
    is_alone = _kind(node) == "=" != _kind(other) and not _is_inequality(other)
    return node.items[1] if isinstance(node, Group) and is_alone and opens(node.items[0]) else node


def _like(node: Node, other: Node) -> Node:
    """1 < x as an interval beside an interval, x = 1, y = 2 as a pair beside a pair."""
    if _is_inequality(node) and _kind(other) in (*_INTERVALS, "union"):
        return as_interval(node) or node
    return (_as_pair(node) if _kind(node) == "list" and _kind(other) == "()" else None) or node


def _kind(node: Node) -> str:
    return node.kind if isinstance(node, Group) else ""


def _is_inequality(node: Node) -> bool:
    return _kind(node) == "!=" or (_kind(node) != "" and set(_kind(node).split()) <= {"<", "<="})


def as_interval(node: Node) -> Group | None:
    """The interval (or union of two) of the x with a < x, x < b, a < x < b or x != a; None for other relations."""
    if not isinstance(node, Group) or not _is_inequality(node):
        return None
    parts = list(node.items)
    signs = node.kind.split()
    if signs == ["!="] and _is_name(parts[0]):
        return Group("union", (Group("()", (Leaf(r"-\infty"), parts[1])), Group("()", (parts[1], Leaf(r"\infty")))))
    if len(parts) == 2 and _is_name(parts[0]):
        parts = [Leaf(r"-\infty"), *parts]
        signs = ["<", *signs]
    elif len(parts) == 2 and _is_name(parts[1]):
        parts = [*parts, Leaf(r"\infty")]
        signs = [*signs, "<"]
    if len(parts) != 3 or not _is_name(parts[1]) or "!=" in signs:
        return None
    return Group(("(" if signs[0] == "<" else "[") + (")" if signs[1] == "<" else "]"), (parts[0], parts[2]))


def _as_pair(node: Node) -> Group | None:
    """(1,2) for x = 1, y = 2, in the order of the names; None for other lists."""
    assert isinstance(node, Group)
    values = {}
    for item in node.items:
        if not isinstance(item, Group) or item.kind != "=" or not isinstance(item.items[0], Leaf) or not _is_name(item.items[0]):
            return None
        values[item.items[0].value] = item.items[1]
    return Group("()", tuple(values[name] for name in sorted(values)))
