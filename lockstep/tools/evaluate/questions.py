"""What is asked and what was answered; files of prompts as questions; and whether a question was in the training data.

A question counts as trained on if it has 13 words in a row with a training text, after normalising (GPT-3, appendix C). A question of fewer
words is looked for as a whole; a question of fewer than five cannot be told. Words that all questions of a source begin or end with (an
instruction) do not count.
"""

import hashlib
import itertools
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lockstep.config.ppo import PPOConfig
from lockstep.data.encoder import ChatPrompt
from lockstep.data.row_files import RowFiles, choose_rows
from lockstep.data.tag import Tag
from lockstep.errors import DataError
from lockstep.trainer.ppo.prompts import open_dataset

_UNNAMED = "unknown"
"""The source of rows that name none, as in validation."""
NUM_WORDS = 13
_FEWEST = 5
_WORD = re.compile(r"[^\W_]+")
_BATCH = 1024


@dataclass(frozen=True)
class Question:
    """One question, as a model is asked it and as its answers are judged."""

    source: str
    """Its data_source, or the name of its task: what numbers are summed up by."""
    text: str
    """The question alone, without examples before it: what it is known by, and what is looked for in training data."""
    prompt: ChatPrompt
    """Messages for the chat template, or a text."""
    is_plain: bool
    """Whether the prompt is a text that goes to the model as it is."""
    columns: dict[str, Any]
    """data_source, reward_model and extra_info, as a reward reads them."""
    index: int = 0
    """Its number in its files, which random numbers depend on."""
    prompt_ids: tuple[int, ...] | None = None
    """Where they are known already."""
    choices: tuple[str, ...] = ()
    """Continuations of the prompt of which the likeliest is the answer; empty where the answer is written."""

    @property
    def tag(self) -> Tag:
        """What its row says about its judges."""
        return Tag.of(self.columns.get("data_source"), self.columns.get("reward_model"))

    @property
    def hash(self) -> str:
        """The name of the question in result files: the same for the same text and truth, whatever the template."""
        truth = (self.columns.get("reward_model") or {}).get("ground_truth")
        return digest([self.source, self.text, truth])


@dataclass(slots=True)
class Sample:
    """One answer to one question."""

    question: int
    """The question's number."""
    number: int
    """Which of its samples."""
    text: str = ""
    finish_reason: str = "stop"
    """"stop", "length" or "error"."""
    num_tokens: int | None = None
    """None where a server does not say."""
    failure: str | None = None
    """Why it has no scores."""
    scores: dict[str, float] = field(default_factory=dict)
    preds: dict[str, str] = field(default_factory=dict)
    """Name of a score, or "*" for all -> the answer that it judged, for the majority."""
    extra: dict[str, Any] = field(default_factory=dict)
    """What else is known of it."""


def digest(value: Any) -> str:
    """Return 16 hex digits of anything that JSON can hold."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]


# -- rows that PPO would validate on -----------------------------------------------------------------------------------------------------


def data_questions(config: PPOConfig, files: Any, tokenizer: Any, limit: int | None) -> tuple[list[Question], dict[str, Any]]:
    """Return the first `limit` rows that PPO would validate on, and how they are asked.

    With a tokenizer they are the rows of PPO's dataset: lengths, truncation and filter as the config says. A server (None) has its own
    template and limits. Raises DataError for files or rows that cannot be used.
    """
    data = config.data
    paths = [files] if isinstance(files, str) else list(files)
    items: Iterable[Mapping[str, Any]]
    if tokenizer is not None:
        dataset = open_dataset(config, tokenizer, paths, data.val_max_samples)
        items = [dataset[i] for i in range(min(len(dataset), limit or len(dataset)))]
    else:
        rows = RowFiles(paths)
        if data.prompt_key not in rows.columns:
            raise DataError(
                f"no column {data.prompt_key!r} in {paths}: the columns are {sorted(rows.columns)}; set data.prompt_key"
            )
        chosen = choose_rows(len(rows), data.val_max_samples, data.shuffle, config.data_seed)[:limit].tolist()
        items = [row | {"raw_prompt": row[data.prompt_key], "index": i} for i, row in zip(chosen, rows.rows(chosen), strict=True)]
    questions = [_question(item) for item in items]
    if not questions:
        raise DataError(f"no rows in {paths}")
    template = {"files": paths, "form": "chat", "template_kwargs": dict(data.apply_chat_template_kwargs)}
    return questions, template | {"hash": digest([template["form"], template["template_kwargs"]])}


def _question(item: Mapping[str, Any]) -> Question:
    prompt = item["raw_prompt"]
    ids = item.get("prompt_ids")
    if isinstance(prompt, str):
        text = prompt
    else:
        text = "\n".join(str(turn.get("content")) for turn in prompt if turn.get("role") == "user")
    columns = {name: item.get(name) for name in ("data_source", "reward_model", "extra_info")}
    source = str(item.get("data_source") or _UNNAMED)
    prompt_ids = None if ids is None else tuple(ids)
    return Question(source, text, prompt, False, columns, int(item.get("index", 0)), prompt_ids)


# -- questions in the training data ------------------------------------------------------------------------------------------------------


def find_contaminated(questions: Sequence[Question], texts: Iterable[str]) -> set[int]:
    """Return the numbers of the questions that share 13 words in a row, or all their words, with one of the `texts`."""
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
    """Return how many questions have too few words to tell."""
    return sum(len(words) < _FEWEST for words in _own_words(questions))


def training_texts(files: Any) -> Iterator[str]:
    """Yield all text of each row of the training files, whatever its columns. Raises DataError if a file cannot be read."""
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
    """Return the words of each question without the words that all questions of its source begin and end with."""
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
    """Return with how many words all texts begin alike."""
    return sum(1 for _ in itertools.takewhile(lambda column: len(set(column)) == 1, zip(*texts, strict=False)))


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())


def _grams(words: Sequence[str], size: int) -> Iterator[tuple[str, ...]]:
    return (tuple(words[i : i + size]) for i in range(len(words) - size + 1))
