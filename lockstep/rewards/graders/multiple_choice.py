r"""Multiple choice (HellaSwag): the last answer of the response, as a letter A to D, a number 0 to 3, or the text of an ending.

```text
1. what says that it is the answer: \boxed{B}, "Answer: B", "the answer is (B)", "<answer>B</answer>", "#### B"    the last one counts
2. otherwise a letter that stands alone: a line "B", "B. he runs", or "(B)" and "option B" in a line        the last line with one
3. otherwise an ending of the row that the response quotes
```

There is no answer where the statement or line that counts names two choices, where two statements that disagree stand side by side, where
the line that counts is one of a list of the choices, and where two endings are quoted. Only the last 10,000 characters are looked at.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from lockstep.errors import DataError
from lockstep.utils.characters import to_ascii

_MAX_RESPONSE = 10_000
_LETTERS = "ABCD"

_DECORATION = r"(?:[\s*_`\"'$(\[{<]|\\(?:text|textbf|mathrm|mathbf|boxed|fbox)(?![a-z])|\b(?i:option|choice|ending|letter)\b)*+"
# "A man ..." begins a sentence: a capital A before a small word is a choice only if the word goes on about it. Small letters and numbers
# count where punctuation or the line's end closes them.
_ITEM = re.compile(
    rf"{_DECORATION}(?:([B-D])(?![\w'])|(A)(?![\w'])(?![ \t]+(?!(?:is|or|and|because|since|as)\b)[a-z])"
    r"|([a-d0-3])\b(?!\.[0-9])(?=[ \t]*(?:[^\w\s]|$)|[ \t]+(?:is|or|and|because|since)\b))",
    re.MULTILINE,
)
_JOINT = re.compile(r"[\s.,;/&*_`\"'$)\]}>]*+(?:(?:or|and)\b)?")
_CLAIM = re.compile(
    r"\\(?:boxed|fbox)(?![a-z])|\#{4}|(?i:\bI(?:'d|\s+would)?\s+(?:choose|pick|select)\b)"
    r"|(?i:\b(?:answer|choice|option|ending|continuation)(?:\*|_|\s)*(?:\b(?:is|was|would\s+be|should\s+be)\b\s*:?|[:=>-]))"
)
_BARE_LINE = re.compile(r"[\s*_`\"'$(\[{]*([A-Da-d0-3])[\s*_`\"'$)\]}.:]*")
_LISTED = re.compile(r"[\s*_`]*\(?([A-D])[.):](?=\s*\S)")
_MENTION = re.compile(r"\(([A-D])\)|\b(?i:option|choice|ending)[ \t]+\(?([A-D])(?![\w'])")


def compute_score(solution_str: str, ground_truth: str | int, extra_info: Mapping[str, Any] | None = None) -> float:
    """1.0 when the response's last answer is the right choice, else 0.0.

    `ground_truth` is a letter A to D, or the dataset's label 0 to 3 as a number or a string. With `extra_info["endings"]` (or "choices", a
    list of texts) a response without a letter or number counts as the one ending that it quotes, apart from white space. Raises DataError
    for another ground truth.
    """
    return float(last_choice(solution_str, _endings(extra_info)) == _letter(ground_truth))


def last_choice(response: str, endings: Sequence[str] = ()) -> str | None:
    """The letter that the response answers with; None when there is none or more than one."""
    text = to_ascii(response[-_MAX_RESPONSE:])
    claims = [(match.start(), *_items(text, match.end())) for match in _CLAIM.finditer(text)]
    claims = [claim for claim in claims if claim[1]]
    if claims:
        return _last_claim(text, claims)
    letters = _letters_that_stand_alone(text.splitlines())
    if letters:
        return _only(letters)
    return _only(_quoted(text, endings))


def _items(text: str, position: int) -> tuple[set[str], int]:
    """The choices named from this position on ("B", "(A) or (B)"), and where they end."""
    letters: set[str] = set()
    end = position
    while item := _ITEM.match(text, position):
        letters.add(_as_letter(item[1] or item[2] or item[3]))
        end = item.end()
        joint = _JOINT.match(text, end)
        position = joint.end() if joint else end
        if not re.search("or|and|[,/&]", text[end:position]):
            break
    return letters, end


def _last_claim(text: str, claims: Sequence[tuple[int, set[str], int]]) -> str | None:
    """The last claim's letter, unless a claim right before it, with no word in between, names another."""
    start, letters, _ = claims[-1]
    for _, earlier, end in reversed(claims[:-1]):
        joint = _JOINT.match(text, min(end, start))
        if joint is None or joint.end() < start:
            break
        letters = letters | earlier
    return _only(letters)


def _letters_that_stand_alone(lines: Sequence[str]) -> set[str]:
    """The choices of the last line that names one by a letter (or number) alone, "(B)" or "option B"; several where it is not clear."""
    listed = {match[1] for line in lines if (match := _LISTED.match(line))}
    written = [line for line in lines if line.strip()]
    for i, line in reversed(list(enumerate(written))):
        if bare := _BARE_LINE.fullmatch(line):
            neighbour = _BARE_LINE.fullmatch(written[i - 1]) if i else None
            return {_as_letter(match[1]) for match in (bare, neighbour) if match}
        mentioned = {match[1] or match[2] for match in _MENTION.finditer(line)}
        if _LISTED.match(line):
            return mentioned | listed
        if mentioned:
            return mentioned
    return set()


def _quoted(text: str, endings: Sequence[str]) -> set[str]:
    """The endings that the text contains; one that is a part of another quoted ending is not counted."""
    text = " ".join(text.split())
    plain = [" ".join(to_ascii(ending).split()) for ending in endings]
    found = {i for i, ending in enumerate(plain) if ending and ending in text}
    return {_LETTERS[i] for i in found if not any(plain[i] != plain[j] and plain[i] in plain[j] for j in found)}


def _only(letters: set[str]) -> str | None:
    return next(iter(letters)) if len(letters) == 1 else None


def _as_letter(label: str) -> str:
    return _LETTERS[int(label)] if label.isdigit() else label.upper()


def _letter(ground_truth: str | int) -> str:
    label = str(ground_truth).strip()
    if isinstance(ground_truth, bool) or not re.fullmatch("[A-Da-d0-3]", label):
        raise DataError(f"the ground truth of a multiple-choice row must be A to D or 0 to 3, not {ground_truth!r}")
    return _as_letter(label)


def _endings(extra_info: Mapping[str, Any] | None) -> list[str]:
    endings = (extra_info or {}).get("endings", (extra_info or {}).get("choices"))
    texts = [] if endings is None else list(endings)  # a list, or the array that a Parquet file gives
    if isinstance(endings, str | Mapping) or len(texts) > len(_LETTERS) or not all(isinstance(text, str) for text in texts):
        raise DataError(f"extra_info['endings'] must be a list of at most {len(_LETTERS)} texts, not {endings!r}")
    return texts
