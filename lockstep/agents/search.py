"""Search over local files with BM25: what `agent.tools='[search]'` calls.

Texts are cut into passages at blank lines; each row of a .jsonl file is a passage. A passage d scores for a query

    sum over the query's words w of  log(1 + (N - n_w + 0.5) / (n_w + 0.5)) * f * (k1 + 1) / (f + k1 * (1 - b + b * |d| / mean |d|))

where f counts w in d, and n_w counts the passages, of N, that contain w. Passages with equal scores are in the order of the files, which
are sorted by name, so the same query has the same answer everywhere.
"""

import functools
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lockstep.agents.tools import Tool, ToolError
from lockstep.errors import ConfigError

_K1 = 1.5
_B = 0.75
_SUFFIXES = (".txt", ".md", ".rst", ".jsonl")
_WORD = re.compile(r"\w+")


@dataclass(frozen=True)
class Passage:
    """A piece of text."""

    source: str
    """File in the folder and line where the passage begins."""
    text: str


class Index:
    """The passages of a folder, indexed by word."""

    def __init__(self, passages: list[Passage]) -> None:
        self.passages = passages
        places: dict[str, list[int]] = defaultdict(list)
        counts: dict[str, list[int]] = defaultdict(list)
        lengths = np.zeros(len(passages))
        for number, passage in enumerate(passages):
            words = Counter(_words(passage.text))
            lengths[number] = words.total()
            for word, count in words.items():
                places[word].append(number)
                counts[word].append(count)
        self._places = {word: np.array(found) for word, found in places.items()}
        norm = _K1 * (1 - _B + _B * lengths / max(lengths.mean(), 1.0))
        self._weights = {word: self._weight(np.array(counts[word]), norm[found]) for word, found in self._places.items()}

    def _weight(self, counts: np.ndarray, norm: np.ndarray) -> np.ndarray:
        rarity = np.log(1 + (len(self.passages) - len(counts) + 0.5) / (len(counts) + 0.5))
        return np.asarray(rarity * counts * (_K1 + 1) / (counts + norm))

    def scores(self, query: str) -> np.ndarray:
        """Return the score of every passage."""
        total = np.zeros(len(self.passages))
        for word in _words(query):
            if word in self._places:
                total[self._places[word]] += self._weights[word]
        return total

    def best(self, query: str, count: int) -> list[Passage]:
        """Return the passages with a word of the query, best first."""
        scores = self.scores(query)
        order = np.argsort(-scores, kind="stable")[:count]
        return [self.passages[i] for i in order if scores[i] > 0]


def search_tool(folder: str | None, count: int) -> Tool:
    """Read the folder and return the tool. Raise ConfigError if there is nothing to search."""
    if folder is None:
        raise ConfigError(
            "agent.tools has search, and agent.search_folder does not say where: agent.search_folder=FOLDER of text files"
        )
    _index(folder)
    function = {
        "name": "search",
        "description": f"Searches a collection of texts and returns the {count} passages that fit best.",
        "parameters": {
            "type": "object",
            "properties": {"query": {"type": "string", "description": "Words that the passage should have."}},
            "required": ["query"],
        },
    }
    return Tool("search", {"type": "function", "function": function}, functools.partial(search, folder=folder, count=count))


def search(query: str, folder: str, count: int) -> str:
    """Return the passages of a folder that fit the query best, as text. Raise ToolError for a query without words."""
    if not _words(query):
        raise ToolError("the query has no words")
    found = _index(folder).best(query, count)
    return "\n\n".join(f"[{passage.source}]\n{passage.text}" for passage in found) or f"no passage has a word of {query[:200]!r}"


@functools.cache
def _index(folder: str) -> Index:
    """Read once a process."""
    root = Path(folder).expanduser()
    if not root.is_dir():
        raise ConfigError(f"agent.search_folder={folder} is not a folder")
    files = sorted(path for path in root.rglob("*") if path.suffix in _SUFFIXES and path.is_file())
    passages = [passage for file in files for passage in _passages(file, file.relative_to(root).as_posix())]
    if not passages:
        raise ConfigError(f"agent.search_folder={folder} has no text in files that end in {', '.join(_SUFFIXES)}")
    return Index(passages)


def _passages(file: Path, name: str) -> Iterator[Passage]:
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"agent.search_folder: {file} cannot be read as UTF-8 text: {error}") from error
    if file.suffix == ".jsonl":
        for number, line in enumerate(text.splitlines(), 1):
            if line.strip():
                yield Passage(f"{name}:{number}", _text_of(line, f"{file}, line {number}"))
        return
    begin = 1
    lines = []
    for number, line in enumerate([*text.splitlines(), ""], 1):
        if line.strip():
            lines.append(line)
        else:
            if lines:
                yield Passage(f"{name}:{begin}", "\n".join(lines))
            begin = number + 1
            lines = []


def _text_of(line: str, where: str) -> str:
    try:
        row = json.loads(line)
        return str(row["text"] if "text" in row else row["contents"])
    except (ValueError, LookupError, TypeError) as error:
        raise ConfigError(f"agent.search_folder: {where} must be JSON with a text or contents: {error!r}") from error


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())
