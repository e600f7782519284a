"""Whether a question was in the training data: 13 words in a row that both have, after normalising (GPT-3, appendix C).

A question of fewer words is looked for as a whole; one of fewer than five cannot be told. Words that all questions of a source begin or end
with (an instruction) do not count.
"""

import itertools
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from lockstep.data.row_files import RowFiles
from lockstep.tools.evaluate.question import Question

NUM_WORDS = 13
_FEWEST = 5
_WORD = re.compile(r"[^\W_]+")
_BATCH = 1024


def find_contaminated(questions: Sequence[Question], texts: Iterable[str]) -> set[int]:
    """The numbers of the questions of which one of the `texts` has 13 words in a row, or all."""
    places: dict[int, dict[tuple[str, ...], set[int]]] = defaultdict(lambda: defaultdict(set))
    for i, words in enumerate(_own_words(questions)):
        size = min(NUM_WORDS, len(words))
        if size >= _FEWEST:
            for gram in _grams(words, size):
                places[size][gram].add(i)
    ends = {size: {(gram[0], gram[-1]) for gram in known} for size, known in places.items()}
    found: set[int] = set()
    for text in texts:
        words = _words(text)
        for size, known in places.items():
            for i, pair in enumerate(zip(words, words[size - 1 :], strict=False)):
                if pair in ends[size]:  # of millions of places few are looked at further
                    found |= known.get(tuple(words[i : i + size]), set())
    return found


def num_too_short(questions: Sequence[Question]) -> int:
    """How many questions have too few words to tell."""
    return sum(len(words) < _FEWEST for words in _own_words(questions))


def training_texts(files: Any) -> Iterator[str]:
    """All text of each row of the training files, whatever its columns. Raises DataError where a file cannot be read."""
    rows = RowFiles([files] if isinstance(files, str) else list(files))
    for start in range(0, len(rows), _BATCH):
        for row in rows.rows(range(start, min(start + _BATCH, len(rows)))):
            yield "\n".join(_strings(row))


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for entry in value.values():
            yield from _strings(entry)
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from _strings(entry)


def _own_words(questions: Sequence[Question]) -> list[list[str]]:
    """The words of each question without those that all questions of its source begin and end with."""
    words = [_words(question.text) for question in questions]
    by_source: dict[str, list[int]] = defaultdict(list)
    for i, question in enumerate(questions):
        by_source[question.source].append(i)
    for rows in by_source.values():
        if len({tuple(words[i]) for i in rows}) < 2:
            continue
        start = _num_shared([words[i] for i in rows])
        end = _num_shared([words[i][start:][::-1] for i in rows])
        for i in rows:
            words[i] = words[i][start : len(words[i]) - end]
    return words


def _num_shared(texts: Sequence[Sequence[str]]) -> int:
    """With how many words all texts begin alike."""
    return sum(1 for _ in itertools.takewhile(lambda column: len(set(column)) == 1, zip(*texts, strict=False)))


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())


def _grams(words: Sequence[str], size: int) -> Iterator[tuple[str, ...]]:
    return (tuple(words[i : i + size]) for i in range(len(words) - size + 1))
