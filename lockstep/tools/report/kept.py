"""The samples that a run kept: read from its files, thinned to what a page can hold, packed into blocks.

Two kinds of files hold them: `samples/train_N.npz` and `val_N.npz`, with numbers by token (trainer/ppo/kept_samples.py), and the JSONL
files of trainer.rollout_data_dir and trainer.validation_data_dir, which have the whole batch but no tokens. Both are in the batch's order:
what the first does not have of a step is taken from the second.
"""

import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.tools.report.tail import JsonLines, read_json

OUTCOMES = ("stop", "length", "missing", "error", "abort", "")
"""What became of a response: finish reasons, or its reward is missing. The last: not known."""
MAX_FILE_BYTES = 1_000_000_000
"""The most that the arrays of one file may be: a short file can inflate to any size."""
_UNREADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError, EOFError, MemoryError, OverflowError, NotImplementedError)
"""What numpy and the checks here raise for a file that a run did not write."""
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


@dataclass(slots=True)
class Batch:
    """The kept samples of one step or validation."""

    step: int
    is_validation: bool
    rows: list[dict[str, Any]]
    """prompt, response, truth, group, length, finish, reward, failure, said."""
    lengths: np.ndarray
    """Response tokens of the first rows: those with numbers by token."""
    columns: dict[str, np.ndarray]
    """Numbers by token of these rows, end to end, and the token ids as "token"."""
    vocabulary: dict[str, str] = field(default_factory=dict)
    """Token id -> its text."""
    sources: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Data source -> counts of the whole batch."""


def find_files(folder: Path, others: dict[str, Path]) -> dict[tuple[int, bool], list[Path]]:
    """(step, is it a validation) -> its files. `others`: the folders of JSONL files, "train" and "val"."""
    found: dict[tuple[int, bool], list[Path]] = {}
    for split in ("train", "val"):
        names = [(path, path.stem.removeprefix(f"{split}_")) for path in (folder / "samples").glob(f"{split}_*.npz")]
        if split in others:
            names += [(path, path.stem) for path in others[split].glob("*.jsonl")]
        for path, number in names:
            if number.isdecimal():
                found.setdefault((int(number), split == "val"), []).append(path)
    return dict(sorted(found.items()))


def read_batch(step: int, is_validation: bool, files: list[Path], gamma: float, by_turn: bool = False) -> Batch:
    """The samples in those files, with the TD errors that `gamma` gives. Raises ValueError where one cannot be read."""
    batch = Batch(step, is_validation, [], np.zeros(0, np.int32), {})
    for file in sorted(files, key=lambda path: path.suffix, reverse=True):  # npz first
        if file.suffix == ".npz":
            _read_npz(file, batch)
            if "value" in batch.columns and "reward" in batch.columns:
                batch.columns["td_error"] = td_errors(batch.columns, batch.lengths, gamma, by_turn)
        else:
            batch.rows += [_plain_row(row) for row in JsonLines(file).read_new()][len(batch.rows) :]
    return batch


def num_bytes(file: Path) -> int:
    """Return how many bytes the arrays of a .npz file are, as it says itself; 0 if it cannot be read."""
    try:
        with zipfile.ZipFile(file) as archive:
            return sum(member.file_size for member in archive.infolist())
    except (OSError, ValueError, zipfile.BadZipFile):
        return 0


def _read_npz(file: Path, batch: Batch) -> None:
    try:
        if num_bytes(file) > MAX_FILE_BYTES:
            raise ValueError(f"its arrays are larger than {MAX_FILE_BYTES / 1e9:.1f} GB")
        with np.load(file, allow_pickle=False) as arrays:
            texts = read_json(arrays["rows"].tobytes())
            lengths = _column(arrays["lengths"], "iu", np.int32)
            columns = {"token": _column(arrays["tokens"], "iu", np.int32)}
            for old, new in _TOKEN_NAMES.items():
                if old in arrays:
                    columns[new] = _column(arrays[old], "iub", np.uint8) if new == "mask" else _column(arrays[old], "f", np.float16)
        rows, vocabulary, sources = texts["rows"], texts["vocabulary"], texts["sources"]
        if not (all(map(_is_row, rows)) and all(isinstance(text, str) for text in vocabulary.values())):
            raise ValueError("its rows or its vocabulary are malformed")
        if not all(_is_count(count) for count in sources.values()):
            raise ValueError("its counts of data sources are malformed")
        total = int(lengths.sum(dtype=np.int64))
        if len(lengths) > len(rows) or (lengths < 0).any() or any(len(column) != total for column in columns.values()):
            raise ValueError("its columns have different lengths")
        _hide_unlearned(columns)
    except (*_UNREADABLE, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(f"{file.name} cannot be read: {error}") from error
    batch.rows, batch.vocabulary, batch.sources, batch.lengths, batch.columns = rows, vocabulary, sources, lengths, columns


def _column(array: np.ndarray, kinds: str, dtype: Any) -> np.ndarray:
    """The array as `dtype`. Raises ValueError unless it has one dimension, and numbers of these kinds (numpy's letters)."""
    if array.ndim != 1 or array.dtype.kind not in kinds:
        raise ValueError(f"a column is of {array.dtype} in {array.ndim} dimensions")
    if kinds != "f" and len(array) and not (np.iinfo(dtype).min <= array.min() and array.max() <= np.iinfo(dtype).max):
        raise ValueError("a whole number is out of range")
    with np.errstate(over="ignore"):
        return array.astype(dtype)


def _hide_unlearned(columns: dict[str, np.ndarray]) -> None:
    """Set what was computed of the policy's tokens alone to nan at all others: a row that was left out has no ratio and no probability."""
    others = columns["mask"] == 0
    for name in ("log_prob", "log_ratio", "sampler_log_ratio", "kl", "entropy"):
        if name in columns:
            columns[name][others] = np.nan


def _is_row(row: Any) -> bool:
    """Whether a row has what the page shows of it, in the types that it expects."""
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


def td_errors(columns: dict[str, np.ndarray], lengths: np.ndarray, gamma: float, by_turn: bool = False) -> np.ndarray:
    """reward + gamma * value of the policy's next token - value, 0 at tokens that are not the policy's (float16, as the columns).

    `by_turn` (algorithm.discount_unit=turn): gamma is between turns only.
    """
    out = np.zeros(len(columns["value"]), np.float16)
    rewards, values, mask = columns["reward"].astype(np.float32), columns["value"].astype(np.float32), columns["mask"].astype(bool)
    for start, end in _spans(lengths):
        own = np.flatnonzero(mask[start:end]) + start
        following = np.append(values[own[1:]], 0.0) if len(own) else values[own]
        discount = np.full(len(own), gamma)
        if by_turn and "turn" in columns:
            discount[:-1][np.diff(columns["turn"][own]) == 0] = 1.0
        out[own] = rewards[own] + discount * following - values[own]
    return out


def _plain_row(row: dict[str, Any]) -> dict[str, Any]:
    known = {"step", "input", "output", "gts", "score"}
    return {
        "prompt": str(row.get("input", "")),
        "response": str(row.get("output", "")),
        "truth": row.get("gts"),
        "group": str(row.get("input", "")),
        "length": None,
        "finish": None,
        "reward": row.get("score"),
        "failure": None,
        "said": {key: value for key, value in row.items() if key not in known},
    }


def _spans(lengths: np.ndarray) -> Iterator[tuple[int, int]]:
    ends = np.cumsum(lengths).tolist()
    return zip([0, *ends[:-1]], ends, strict=False) if ends else iter(())


def row_numbers(batch: Batch) -> dict[str, np.ndarray]:
    """reward, length, kl (the mean over the policy's tokens), nan where not known, and the outcome's number in OUTCOMES."""
    kl = np.full(len(batch.rows), np.nan, np.float32)
    if "kl" in batch.columns:
        values, mask = batch.columns["kl"].astype(np.float32), batch.columns["mask"].astype(bool)
        for row, (start, end) in enumerate(_spans(batch.lengths)):
            own = values[start:end][mask[start:end]]
            kl[row] = own.mean() if len(own) else np.nan
    outcomes = ["missing" if row["failure"] else row["finish"] or "" for row in batch.rows]
    return {
        "reward": np.array([_number(row["reward"]) for row in batch.rows], np.float32),
        "length": np.array([_number(row["length"]) for row in batch.rows], np.float32),
        "kl": kl,
        "outcome": np.array([OUTCOMES.index(o if o in OUTCOMES else "") for o in outcomes], np.uint8),
    }


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else np.nan
