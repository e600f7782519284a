"""Collector: the blocks of one or several runs, thinned to what a page can hold."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.tools.report.html import Block, columns_block, json_block
from lockstep.tools.report.run_files import OUTCOMES, SampleBatch, row_numbers
from lockstep.tools.report.run_folder import RunFolder

_ROWS_PER_BLOCK = 500
_TOKENS_PER_BLOCK = 50_000
_MIN_CHARACTERS = 300
"""Characters of a prompt or a response that are always shown."""
_MAX_CHARACTERS = 1 << 20
_MAX_SAID = 2_000
"""Characters of a value that a reward function returned beside the score."""


@dataclass(frozen=True)
class PageLimits:
    """The most that a page holds."""

    samples: int = 100_000
    tokens: int = 1_000_000
    """Tokens with numbers, at most about 27 bytes each."""
    characters: int = 60_000_000
    """Characters of prompts and responses, about half a byte each."""

    def shrunk(self, share: float) -> PageLimits:
        """Return limits with as many samples and less of each."""
        return PageLimits(self.samples, int(share * self.tokens), int(share * self.characters))


class Collector:
    """Reads runs and makes blocks of what is new. Raises DataError if a folder is not the folder of a run."""

    def __init__(self, folders: Sequence[Path], limits: PageLimits | None = None) -> None:
        self.runs = [RunFolder(folder, name) for folder, name in zip(folders, _names(folders), strict=True)]
        self.limits = limits or PageLimits()
        self.num_samples = 0
        """Samples in the blocks so far."""
        self.num_found = 0
        """Samples in the runs' files so far."""
        self.num_with_tokens = 0
        """Samples in the blocks that have numbers by token."""
        self._prompts: dict[str, int] = {}
        self._vocabularies: list[set[str]] = [set() for _ in folders]
        self._shares: _Shares | None = None
        self._head: dict[str, Any] = {}

    def was_rewritten(self) -> bool:
        """Return whether a run resumed from an earlier step: a new collector is needed."""
        return any(run.was_rewritten() for run in self.runs)

    def collect(self) -> list[Block]:
        """Return the blocks of what is new; the first call returns everything."""
        steps = [run.new_steps() for run in self.runs]
        batches = self._new_batches()
        blocks = []
        if self._shares is None:
            self._shares = _Shares.of([batch for _, batch in batches], self.limits)
            blocks += [json_block("settings", {"run": n, **run.settings}) for n, run in enumerate(self.runs)]
        blocks += [_metrics(number, self.runs[number], rows) for number, rows in enumerate(steps) if rows]
        if batches:
            blocks += self._samples(batches, self._shares)
        head = self._describe(self._shares)
        if head != self._head:
            self._head = head
            blocks.insert(0, json_block("head", head))
        return blocks

    def _new_batches(self) -> list[tuple[int, SampleBatch]]:
        """Return (number of the run, batch) for the new files that can be read and have a row."""
        batches = []
        for number, run in enumerate(self.runs):
            for key, files in run.new_files().items():
                batch = run.read(key, files)
                if batch is not None and batch.rows:
                    batches.append((number, batch))
        return batches

    def _describe(self, shares: _Shares) -> dict[str, Any]:
        runs = [
            {
                "name": run.name,
                "folder": str(run.folder),
                "alarms": run.alarms,
                "notes": run.problems(),
                "recipe": run.settings["recipe"],
                "total": run.total_steps,
            }
            for run in self.runs
        ]
        return {
            "runs": runs,
            "outcomes": OUTCOMES,
            "samples": {"shown": self.num_samples, "found": self.num_found, "with_tokens": self.num_with_tokens},
            "characters": shares.characters,
        }

    def _samples(self, batches: list[tuple[int, SampleBatch]], shares: _Shares) -> list[Block]:
        rows = _Rows()
        texts = _Texts()
        tokens = _Tokens(self.num_with_tokens)
        first = self.num_samples
        for number, batch in batches:
            self.num_found += len(batch.rows)
            shares.cut(batch)
            prompts = [self._prompts.setdefault(row["prompt"], len(self._prompts)) for row in batch.rows]
            rows.add(number, batch, prompts, self.num_with_tokens)
            texts.add(batch, shares.characters)
            tokens.add(batch)
            self.num_samples += len(batch.rows)
            self.num_with_tokens += len(batch.lengths)
        numbers = sorted({number for number, _ in batches})
        vocabulary = [json_block("vocabulary", self._new_words(number, batches)) for number in numbers]
        return [rows.block(), *texts.blocks(first), *tokens.blocks(), *vocabulary]

    def _new_words(self, number: int, batches: list[tuple[int, SampleBatch]]) -> dict[str, Any]:
        known = self._vocabularies[number]
        new: dict[str, str] = {}
        for run, batch in batches:
            if run == number:
                new |= {token: text for token, text in batch.vocabulary.items() if token not in known}
        known |= new.keys()
        return {"run": number, "texts": new}


@dataclass(frozen=True)
class _Shares:
    """Which part of each batch is shown, so that the page stays within the limits."""

    rows: float
    tokens: float
    characters: int
    """The most of a prompt or a response."""

    @staticmethod
    def of(batches: list[SampleBatch], limits: PageLimits) -> _Shares:
        num_rows = max(1, sum(len(batch.rows) for batch in batches))
        rows = min(1.0, limits.samples / num_rows)
        num_tokens = max(1.0, rows * sum(int(batch.lengths.sum()) for batch in batches))
        num_characters = rows * sum(len(row["prompt"]) + len(row["response"]) for batch in batches for row in batch.rows)
        if num_characters <= limits.characters:
            characters = _MAX_CHARACTERS
        else:
            characters = max(_MIN_CHARACTERS, int(limits.characters / (rows * num_rows) / 2))
        return _Shares(rows, min(1.0, limits.tokens / num_tokens), characters)

    def cut(self, batch: SampleBatch) -> None:
        """Keep the share of the rows, from the first, and of their tokens."""
        batch.rows = batch.rows[: math.ceil(self.rows * len(batch.rows))]
        lengths = batch.lengths[: len(batch.rows)]
        if len(lengths) and self.tokens < 1.0:
            ends = np.cumsum(lengths)
            num_rows = int(np.searchsorted(ends, self.tokens * ends[-1], side="right"))
            lengths = lengths[: max(1, num_rows)]
        batch.lengths = lengths
        total = int(lengths.sum())
        batch.columns = {name: column[:total] for name, column in batch.columns.items()}


class _Rows:
    """The block with a line of numbers for each sample."""

    def __init__(self) -> None:
        self._parts: list[dict[str, np.ndarray]] = []

    def add(self, run: int, batch: SampleBatch, prompts: list[int], first_with_tokens: int) -> None:
        count = len(batch.rows)
        groups: dict[str, int] = {}
        group_numbers = [groups.setdefault(str(row["group"]), len(groups)) for row in batch.rows]
        with_tokens = np.full(count, -1, np.int32)
        with_tokens[: len(batch.lengths)] = np.arange(len(batch.lengths)) + first_with_tokens
        columns: dict[str, np.ndarray] = {
            "run": np.full(count, run, np.uint8),
            "step": np.full(count, batch.step, np.int32),
            "validation": np.full(count, batch.is_validation, np.uint8),
            "prompt": np.array(prompts, np.int32),
            "group": np.array(group_numbers, np.int32),
            "tokens": with_tokens,
        }
        self._parts.append(columns | row_numbers(batch))

    def block(self) -> Block:
        names = self._parts[0]
        return columns_block("rows", {name: np.concatenate([part[name] for part in self._parts]) for name in names})


class _Texts:
    """The blocks with the texts of samples."""

    def __init__(self) -> None:
        self._rows: list[list[Any]] = []

    def add(self, batch: SampleBatch, most: int) -> None:
        for row in batch.rows:
            said = {key: _bounded(value) for key, value in row["said"].items()}
            prompt = _cut(row["prompt"], most)
            response = _cut(row["response"], most)
            self._rows.append([prompt, response, _bounded(row["truth"]), _bounded(row["failure"]), said or None])

    def blocks(self, first: int) -> list[Block]:
        starts = range(0, len(self._rows), _ROWS_PER_BLOCK)
        return [json_block("texts", _with_shared_prompts(self._rows[s : s + _ROWS_PER_BLOCK]), first + s) for s in starts]


class _Tokens:
    """The blocks with numbers by token. Rows with the same columns, one after the other, share a block."""

    def __init__(self, first: int) -> None:
        self._first = first
        self._next = first
        self._batches: list[SampleBatch] = []
        self._done: list[Block] = []

    def add(self, batch: SampleBatch) -> None:
        if not len(batch.lengths):
            return
        num_held = sum(int(held.lengths.sum()) for held in self._batches)
        if self._batches and (self._batches[0].columns.keys() != batch.columns.keys() or num_held > _TOKENS_PER_BLOCK):
            self._flush()
        self._batches.append(batch)
        self._next += len(batch.lengths)

    def blocks(self) -> list[Block]:
        self._flush()
        return self._done

    def _flush(self) -> None:
        if self._batches:
            names = self._batches[0].columns
            columns = {name: np.concatenate([batch.columns[name] for batch in self._batches]) for name in names}
            lengths = np.concatenate([batch.lengths for batch in self._batches]).astype(np.int32)
            self._done.append(columns_block("tokens", {"lengths": lengths} | columns, self._first))
        self._first = self._next
        self._batches = []


def _metrics(number: int, run: RunFolder, rows: list[dict[str, Any]]) -> Block:
    names = dict.fromkeys(name for row in rows for name in row if name not in ("step", "time"))
    intervals: dict[str, list[list[float]]] = {}
    for row in rows:
        for name, ends in run.intervals(row).items():
            intervals.setdefault(name, []).append([row["step"], *ends])
    value = {
        "run": number,
        "steps": [row["step"] for row in rows],
        "times": [row.get("time") for row in rows],
        "columns": {name: [row.get(name) for row in rows] for name in names},
        "intervals": intervals,
    }
    return json_block("metrics", value)


def _with_shared_prompts(rows: list[list[Any]]) -> list[list[Any]]:
    """Return the rows with 0 for a prompt that is the same as in the row before."""
    shared = []
    previous = None
    for prompt, *others in rows:
        shared.append([0 if prompt == previous else prompt, *others])
        previous = prompt
    return shared


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most]} … ({len(text) - most} more characters)"


def _bounded(value: Any) -> Any:
    """Return what a reward function said, cut if it is long: the messages of an episode, a traceback."""
    text = value if isinstance(value, str) else json.dumps(value)
    return value if len(text) <= _MAX_SAID else _cut(text, _MAX_SAID)


def _names(folders: Sequence[Path]) -> list[str]:
    """Return the folders' names, with their parents' if two are the same."""
    paths = [folder.resolve() for folder in folders]
    names = [path.name for path in paths]
    if len(set(names)) == len(names):
        return names
    return [f"{path.parent.name}/{path.name}" for path in paths]
