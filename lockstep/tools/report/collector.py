"""Collector: the blocks of one or several runs, thinned to what a page can hold."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.tools.report.blocks import Block, columns_block, json_block
from lockstep.tools.report.kept import OUTCOMES, Batch, row_numbers
from lockstep.tools.report.run_folder import RunFolder

_ROWS_A_BLOCK = 500
_TOKENS_A_BLOCK = 50_000
_MIN_CHARACTERS = 300
_MAX_SAID = 2_000


@dataclass(frozen=True)
class Limits:
    """The most that a page holds."""

    samples: int = 100_000
    tokens: int = 1_000_000
    """Tokens with numbers, at most about 27 bytes each."""
    characters: int = 60_000_000
    """Of prompts and responses, about half a byte each."""

    def shrunk(self, share: float) -> Limits:
        """As many samples with less of each."""
        return Limits(self.samples, int(share * self.tokens), int(share * self.characters))


class Collector:
    """Reads runs and makes blocks of what is new. Raises DataError where a folder is no run's."""

    def __init__(self, folders: Sequence[Path], limits: Limits | None = None) -> None:
        self.runs = [RunFolder(folder, name) for folder, name in zip(folders, _names(folders), strict=True)]
        self.limits = limits or Limits()
        self.num_samples = self.num_found = self.num_with_tokens = 0
        self._prompts: dict[str, int] = {}
        self._vocabularies: list[set[str]] = [set() for _ in folders]
        self._shares: _Shares | None = None
        self._head: dict[str, Any] = {}

    def was_rewritten(self) -> bool:
        """Whether a run went on from an earlier step: a new collector is needed."""
        return any(run.was_rewritten() for run in self.runs)

    def collect(self) -> list[Block]:
        """The blocks of what is new; the first call returns all there is."""
        steps = [run.new_steps() for run in self.runs]
        batches = [
            (number, batch)
            for number, run in enumerate(self.runs)
            for key, files in run.new_files().items()
            if (batch := run.read(key, files)) is not None and batch.rows
        ]
        if self._shares is None:
            self._shares = _Shares.of([batch for _, batch in batches], self.limits)
            blocks = [json_block("settings", {"run": n, **run.settings}) for n, run in enumerate(self.runs)]
        else:
            blocks = []
        blocks += [_metrics(number, self.runs[number], rows) for number, rows in enumerate(steps) if rows]
        if batches:
            blocks += self._samples(batches)
        head = self._describe()
        if head != self._head:
            self._head = head
            blocks.insert(0, json_block("head", head))
        return blocks

    def _describe(self) -> dict[str, Any]:
        assert self._shares is not None
        return {
            "runs": [
                {
                    "name": run.name,
                    "folder": str(run.folder),
                    "alarms": run.alarms,
                    "notes": run.problems(),
                    "recipe": run.settings["recipe"],
                    "total": run.total_steps,
                }
                for run in self.runs
            ],
            "outcomes": OUTCOMES,
            "samples": {"shown": self.num_samples, "found": self.num_found, "with_tokens": self.num_with_tokens},
            "characters": self._shares.characters,
        }

    def _samples(self, batches: list[tuple[int, Batch]]) -> list[Block]:
        rows, texts, tokens = _Rows(), _Texts(), _Tokens(self.num_with_tokens)
        assert self._shares is not None
        first = self.num_samples
        for number, batch in batches:
            self.num_found += len(batch.rows)
            self._shares.cut(batch)
            prompts = [self._prompts.setdefault(row["prompt"], len(self._prompts)) for row in batch.rows]
            rows.add(number, batch, prompts, self.num_with_tokens)
            texts.add(batch, self._shares.characters)
            tokens.add(batch)
            self.num_samples += len(batch.rows)
            self.num_with_tokens += len(batch.lengths)
        vocabulary = [json_block("vocabulary", self._new_words(number, batches)) for number in sorted({n for n, _ in batches})]
        return [rows.block(), *texts.blocks(first), *tokens.blocks(), *vocabulary]

    def _new_words(self, number: int, batches: list[tuple[int, Batch]]) -> dict[str, Any]:
        known = self._vocabularies[number]
        new: dict[str, str] = {}
        for run, batch in batches:
            if run == number:
                new |= {token: text for token, text in batch.vocabulary.items() if token not in known}
        known |= new.keys()
        return {"run": number, "texts": new}


@dataclass(frozen=True)
class _Shares:
    """Which part of each batch is shown, so that the whole keeps within the limits."""

    rows: float
    tokens: float
    characters: int
    """Of a prompt or a response."""

    @staticmethod
    def of(batches: list[Batch], limits: Limits) -> _Shares:
        num_rows = max(1, sum(len(batch.rows) for batch in batches))
        share = min(1.0, limits.samples / num_rows)
        num_tokens = max(1.0, share * sum(int(batch.lengths.sum()) for batch in batches))
        total = share * sum(len(row["prompt"]) + len(row["response"]) for batch in batches for row in batch.rows)
        most = 1 << 20 if total <= limits.characters else max(_MIN_CHARACTERS, int(limits.characters / (share * num_rows) / 2))
        return _Shares(share, min(1.0, limits.tokens / num_tokens), most)

    def cut(self, batch: Batch) -> None:
        """Leave the first rows, and the numbers by token of the first of these, up to the share of all tokens."""
        batch.rows = batch.rows[: math.ceil(self.rows * len(batch.rows))]
        lengths = batch.lengths[: len(batch.rows)]
        ends = np.cumsum(lengths)
        if len(lengths) and self.tokens < 1.0:
            lengths = lengths[: max(1, int(np.searchsorted(ends, self.tokens * ends[-1], side="right")))]
        batch.lengths = lengths
        total = int(lengths.sum())
        batch.columns = {name: column[:total] for name, column in batch.columns.items()}


class _Rows:
    def __init__(self) -> None:
        self._parts: list[dict[str, np.ndarray]] = []

    def add(self, run: int, batch: Batch, prompts: list[int], first_with_tokens: int) -> None:
        count = len(batch.rows)
        groups = {group: i for i, group in enumerate(dict.fromkeys(str(row["group"]) for row in batch.rows))}
        with_tokens = np.full(count, -1, np.int32)
        with_tokens[: len(batch.lengths)] = np.arange(len(batch.lengths)) + first_with_tokens
        columns: dict[str, np.ndarray] = {
            "run": np.full(count, run, np.uint8),
            "step": np.full(count, batch.step, np.int32),
            "validation": np.full(count, batch.is_validation, np.uint8),
            "prompt": np.array(prompts, np.int32),
            "group": np.array([groups[str(row["group"])] for row in batch.rows], np.int32),
            "tokens": with_tokens,
        }
        self._parts.append(columns | row_numbers(batch))

    def block(self) -> Block:
        names = self._parts[0]
        return columns_block("rows", {name: np.concatenate([part[name] for part in self._parts]) for name in names})


class _Texts:
    def __init__(self) -> None:
        self._rows: list[list[Any]] = []

    def add(self, batch: Batch, most: int) -> None:
        for row in batch.rows:
            said = {key: _bounded(value) for key, value in row["said"].items()}
            texts = (_cut(row["prompt"], most), _cut(row["response"], most))
            self._rows.append([*texts, _bounded(row["truth"]), _bounded(row["failure"]), said or None])

    def blocks(self, first: int) -> list[Block]:
        starts = range(0, len(self._rows), _ROWS_A_BLOCK)
        return [json_block("texts", _shared(self._rows[s : s + _ROWS_A_BLOCK]), first + s) for s in starts]


class _Tokens:
    """Rows with the same columns, one after the other, share a block."""

    def __init__(self, first: int) -> None:
        self._first = self._next = first
        self._batches: list[Batch] = []
        self._done: list[Block] = []

    def add(self, batch: Batch) -> None:
        if not len(batch.lengths):
            return
        held = sum(int(b.lengths.sum()) for b in self._batches)
        if self._batches and (self._batches[0].columns.keys() != batch.columns.keys() or held > _TOKENS_A_BLOCK):
            self._flush()
        self._batches.append(batch)
        self._next += len(batch.lengths)

    def blocks(self) -> list[Block]:
        self._flush()
        return self._done

    def _flush(self) -> None:
        if self._batches:
            columns = {name: np.concatenate([b.columns[name] for b in self._batches]) for name in self._batches[0].columns}
            lengths = np.concatenate([b.lengths for b in self._batches]).astype(np.int32)
            self._done.append(columns_block("tokens", {"lengths": lengths} | columns, self._first))
        self._first, self._batches = self._next, []


def _metrics(number: int, run: RunFolder, rows: list[dict[str, Any]]) -> Block:
    names = dict.fromkeys(name for row in rows for name in row if name not in ("step", "time"))
    intervals: dict[str, list[list[float]]] = {}
    for row in rows:
        for name, ends in run.intervals(row).items():
            intervals.setdefault(name, []).append([row["step"], *ends])
    columns = {name: [row.get(name) for row in rows] for name in names}
    steps, times = [row["step"] for row in rows], [row.get("time") for row in rows]
    return json_block("metrics", {"run": number, "steps": steps, "times": times, "columns": columns, "intervals": intervals})


def _shared(rows: list[list[Any]]) -> list[list[Any]]:
    """A prompt that is that of the row before is written as 0."""
    return [[0 if i and row[0] == rows[i - 1][0] else row[0], *row[1:]] for i, row in enumerate(rows)]


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most]} … ({len(text) - most} more characters)"


def _bounded(value: Any) -> Any:
    """What a reward function said, cut where it is long: the messages of an episode, a traceback."""
    text = value if isinstance(value, str) else json.dumps(value)
    return value if len(text) <= _MAX_SAID else _cut(text, _MAX_SAID)


def _names(folders: Sequence[Path]) -> list[str]:
    """The folders' names, with their parents' where two are the same."""
    paths = [folder.resolve() for folder in folders]
    names = [path.name for path in paths]
    return names if len(set(names)) == len(names) else [f"{path.parent.name}/{path.name}" for path in paths]
