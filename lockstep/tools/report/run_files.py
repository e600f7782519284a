"""The files of a run as a report reads them: JSON lines that grow, and the samples that the run kept.

Two kinds of files hold samples: `samples/train_N.npz` and `val_N.npz`, with numbers by token (trainer/ppo/samples.py), and the JSONL
files of trainer.rollout_data_dir and trainer.validation_data_dir, which have the whole batch but no tokens. Both are in the batch's order:
rows of a step that the first lacks are taken from the second.
"""

import json
import math
import os
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

OUTCOMES = ("stop", "length", "missing", "error", "abort", "")
"""What became of a response: a finish reason, or its reward is missing. The last: not known."""
MAX_FILE_BYTES = 1_000_000_000
"""The most that the arrays of one file may be: a short file can inflate to any size."""
_UNREADABLE = (
    OSError,
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    EOFError,
    MemoryError,
    OverflowError,
    NotImplementedError,
    zipfile.BadZipFile,
    zlib.error,
)
"""What numpy and the checks here raise for a file that a run did not write."""
_NOT_FINITE = {"NaN": "nan", "Infinity": "inf", "-Infinity": "-inf"}
"""How Python's json writes a number that is not finite -> how the tracker of a run writes it (observability/trackers.py)."""
_MAX_DEPTH = 100
_MAX_DIGITS = 15
"""Digits of the longest whole number that a float surely holds exactly."""
_TOKEN_NAMES = {
    "mask": "mask",
    "turn": "turn",
    "log_probs": "log_prob",
    "log_ratio": "log_ratio",
    "sampler_log_ratio": "sampler_log_ratio",
    "advantages": "advantage",
    "values": "value",
    "kl": "kl",
    "entropys": "entropy",
    "token_level_rewards": "reward",
    "returns": "return",
}
"""Column of a file -> column of the page."""
_POLICY_COLUMNS = ("log_prob", "log_ratio", "sampler_log_ratio", "kl", "entropy")
"""Columns of the page that are computed for the policy's tokens alone."""


# -- JSON ------------------------------------------------------------------------------------------------------------------------------


def read_json(text: str | bytes) -> Any:
    """Return the value, with numbers that are not finite as texts and long whole numbers as floats.

    Raises ValueError if the text is not JSON or is nested too deep.
    """
    try:
        value = json.loads(text, parse_constant=_NOT_FINITE.get, parse_float=_number, parse_int=_number)
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error
    if _is_deep(value):
        raise ValueError(f"it is nested deeper than {_MAX_DEPTH} levels")
    return value


def _number(digits: str) -> int | float | str:
    if digits.lstrip("-").isdecimal() and len(digits) <= _MAX_DIGITS:
        return int(digits)
    number = float(digits)
    return number if math.isfinite(number) else str(number)


def _is_deep(value: Any) -> bool:
    level = [value]
    for _ in range(_MAX_DEPTH):
        inner: list[Any] = []
        for outer in level:
            if isinstance(outer, dict):
                inner.extend(outer.values())
            elif isinstance(outer, list):
                inner.extend(outer)
        if not inner:
            return False
        level = inner
    return True


class JsonLines:
    """Reads each whole line of `path` once. A file that does not exist yet has no lines."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.num_unreadable = 0
        """Lines that are not a JSON object."""
        self._offset = 0
        self._identity: tuple[int, int] | None = None

    def was_rewritten(self) -> bool:
        """Return whether the file no longer begins with what was read: a resumed run drops the steps after its checkpoint."""
        if self._identity is None:
            return False
        try:
            status = os.stat(self.path)
        except FileNotFoundError:
            return True
        return (status.st_dev, status.st_ino) != self._identity or status.st_size < self._offset

    def read_new(self) -> list[dict[str, Any]]:
        """Return the lines that were completed since the last call."""
        try:
            with self.path.open("rb") as file:
                status = os.fstat(file.fileno())
                self._identity = (status.st_dev, status.st_ino)
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        rows = []
        for line in whole.splitlines():
            if not line.strip():
                continue
            row = _row(line)
            if row is None:
                self.num_unreadable += 1
            else:
                rows.append(row)
        return rows


def _row(line: bytes) -> dict[str, Any] | None:
    try:
        row = read_json(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None


# -- samples ---------------------------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class SampleBatch:
    """The kept samples of one step or validation."""

    step: int
    is_validation: bool
    rows: list[dict[str, Any]]
    """prompt, response, truth, group, length, finish, reward, failure, said."""
    lengths: np.ndarray
    """Response tokens of the first rows, which have numbers by token."""
    columns: dict[str, np.ndarray]
    """Numbers by token of these rows, end to end, and the token ids as "token"."""
    vocabulary: dict[str, str] = field(default_factory=dict)
    """Token id -> its text."""
    sources: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Data source -> counts of the whole batch."""

    def spans(self) -> Iterator[tuple[int, int]]:
        """Yield where the tokens of each of the first rows begin and end in `columns`."""
        start = 0
        for length in self.lengths.tolist():
            yield start, start + length
            start += length


def find_files(folder: Path, others: dict[str, Path]) -> dict[tuple[int, bool], list[Path]]:
    """Return (step, is it a validation) -> its files. `others`: the folders of JSONL files, "train" and "val"."""
    found: dict[tuple[int, bool], list[Path]] = {}
    for split in ("train", "val"):
        names = [(path, path.stem.removeprefix(f"{split}_")) for path in (folder / "samples").glob(f"{split}_*.npz")]
        if split in others:
            names += [(path, path.stem) for path in others[split].glob("*.jsonl")]
        for path, number in names:
            if number.isdecimal():
                found.setdefault((int(number), split == "val"), []).append(path)
    return dict(sorted(found.items()))


def read_batch(step: int, is_validation: bool, files: list[Path], gamma: float, by_turn: bool = False) -> SampleBatch:
    """Return the samples in the files, with the TD errors that `gamma` gives. Raises ValueError if a file cannot be read."""
    batch = SampleBatch(step, is_validation, [], np.zeros(0, np.int32), {})
    for file in sorted(files, key=lambda path: path.suffix, reverse=True):  # npz first
        if file.suffix == ".npz":
            _read_npz(file, batch)
            if "value" in batch.columns and "reward" in batch.columns:
                batch.columns["td_error"] = td_errors(batch, gamma, by_turn)
        else:
            rows = [_plain_row(row) for row in JsonLines(file).read_new()]
            batch.rows += rows[len(batch.rows) :]
    return batch


def num_bytes(file: Path) -> int:
    """Return how many bytes the arrays of a .npz file are, as it says itself; 0 if it cannot be read."""
    try:
        with zipfile.ZipFile(file) as archive:
            return sum(member.file_size for member in archive.infolist())
    except (OSError, ValueError, zipfile.BadZipFile):
        return 0


def td_errors(batch: SampleBatch, gamma: float, by_turn: bool = False) -> np.ndarray:
    """Return reward + gamma * value of the policy's next token - value; 0 at tokens of others (float16, as the columns).

    `by_turn` (algorithm.discount_unit=turn): gamma is between turns only.
    """
    columns = batch.columns
    rewards = columns["reward"].astype(np.float32)
    values = columns["value"].astype(np.float32)
    mask = columns["mask"].astype(bool)
    errors = np.zeros(len(values), np.float16)
    for start, end in batch.spans():
        own = np.flatnonzero(mask[start:end]) + start
        if not len(own):
            continue
        following = np.append(values[own[1:]], 0.0)
        discount = np.full(len(own), gamma)
        if by_turn and "turn" in columns:
            discount[:-1][np.diff(columns["turn"][own]) == 0] = 1.0
        errors[own] = rewards[own] + discount * following - values[own]
    return errors


def row_numbers(batch: SampleBatch) -> dict[str, np.ndarray]:
    """Return reward, length and kl (the mean over the policy's tokens), nan if not known, and the outcome's number in OUTCOMES."""
    kl = np.full(len(batch.rows), np.nan, np.float32)
    if "kl" in batch.columns:
        values = batch.columns["kl"].astype(np.float32)
        mask = batch.columns["mask"].astype(bool)
        for row, (start, end) in enumerate(batch.spans()):
            own = values[start:end][mask[start:end]]
            if len(own):
                kl[row] = own.mean()
    return {
        "reward": np.array([_float(row["reward"]) for row in batch.rows], np.float32),
        "length": np.array([_float(row["length"]) for row in batch.rows], np.float32),
        "kl": kl,
        "outcome": np.array([_outcome(row) for row in batch.rows], np.uint8),
    }


def _outcome(row: dict[str, Any]) -> int:
    name = "missing" if row["failure"] else row["finish"]
    return OUTCOMES.index(name if name in OUTCOMES else "")


def _float(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else np.nan


def _read_npz(file: Path, batch: SampleBatch) -> None:
    try:
        if num_bytes(file) > MAX_FILE_BYTES:
            raise ValueError(f"its arrays are larger than {MAX_FILE_BYTES / 1e9:.1f} GB")
        with np.load(file, allow_pickle=False) as arrays:
            texts = read_json(arrays["rows"].tobytes())
            lengths = _column(arrays["lengths"], "iu", np.int32)
            columns = {"token": _column(arrays["tokens"], "iu", np.int32)}
            for old, new in _TOKEN_NAMES.items():
                if old not in arrays:
                    continue
                if new == "mask":
                    columns[new] = _column(arrays[old], "iub", np.uint8)
                else:
                    columns[new] = _column(arrays[old], "f", np.float16)
        rows = texts["rows"]
        vocabulary = texts["vocabulary"]
        sources = texts["sources"]
        if not (all(map(_is_row, rows)) and all(isinstance(text, str) for text in vocabulary.values())):
            raise ValueError("its rows or its vocabulary are malformed")
        if not all(_is_count(count) for count in sources.values()):
            raise ValueError("its counts of data sources are malformed")
        total = int(lengths.sum(dtype=np.int64))
        has_other_lengths = any(len(column) != total for column in columns.values())
        if len(lengths) > len(rows) or (lengths < 0).any() or has_other_lengths:
            raise ValueError("its columns have different lengths")
        _hide_unlearned(columns)
    except _UNREADABLE as error:
        raise ValueError(f"{file.name} cannot be read: {error}") from error
    batch.rows = rows
    batch.vocabulary = vocabulary
    batch.sources = sources
    batch.lengths = lengths
    batch.columns = columns


def _column(array: np.ndarray, kinds: str, dtype: Any) -> np.ndarray:
    """Return the array as `dtype`. Raises ValueError unless it has one dimension, and numbers of these kinds (numpy's letters)."""
    if array.ndim != 1 or array.dtype.kind not in kinds:
        raise ValueError(f"a column is of {array.dtype} in {array.ndim} dimensions")
    if kinds != "f" and len(array) and not (np.iinfo(dtype).min <= array.min() and array.max() <= np.iinfo(dtype).max):
        raise ValueError("a whole number is out of range")
    with np.errstate(over="ignore"):
        return array.astype(dtype)


def _hide_unlearned(columns: dict[str, np.ndarray]) -> None:
    """Set the policy's columns to nan at all other tokens: a row that was left out has no ratio and no probability."""
    others = columns["mask"] == 0
    for name in _POLICY_COLUMNS:
        if name in columns:
            columns[name][others] = np.nan


def _is_row(row: Any) -> bool:
    """Return whether a row has what the page shows of it, in the types that it expects."""
    texts = [row["prompt"], row["response"]]
    optional = [row["finish"], row["failure"]]
    return (
        all(isinstance(text, str) for text in texts)
        and all(text is None or isinstance(text, str) for text in optional)
        and isinstance(row["said"], dict)
        and {"truth", "group", "length", "reward"} <= row.keys()
    )


def _is_count(count: Any) -> bool:
    return isinstance(count, dict) and isinstance(count["prompts"], int) and count["prompts"] > 0


def _plain_row(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row of a JSONL file in the form of an npz file's rows."""
    known = {"step", "input", "output", "gts", "score"}
    prompt = str(row.get("input", ""))
    return {
        "prompt": prompt,
        "response": str(row.get("output", "")),
        "truth": row.get("gts"),
        "group": prompt,
        "length": None,
        "finish": None,
        "reward": row.get("score"),
        "failure": None,
        "said": {key: value for key, value in row.items() if key not in known},
    }
