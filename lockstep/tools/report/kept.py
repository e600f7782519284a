"""The samples that a run kept: read from its files, thinned to what a page can hold, packed into blocks.

Two kinds of files hold them: `samples/train_N.npz` and `val_N.npz`, with numbers by token (trainer/ppo/kept_samples.py), and the JSONL
files of trainer.rollout_data_dir and trainer.validation_data_dir, which have the whole batch but no tokens. Both are in the batch's order:
what the first does not have of a step is taken from the second.
"""

import json
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.tools.report.tail import NOT_FINITE, JsonLines

OUTCOMES = ("stop", "length", "missing", "error", "abort", "")
"""What became of a response: finish reasons, or its reward is missing. The last: not known."""
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


def _read_npz(file: Path, batch: Batch) -> None:
    try:
        with np.load(file, allow_pickle=False) as arrays:
            texts = json.loads(arrays["rows"].tobytes(), parse_constant=NOT_FINITE.get)
            batch.lengths = arrays["lengths"]
            batch.columns = {"token": arrays["tokens"]} | {new: arrays[old] for old, new in _TOKEN_NAMES.items() if old in arrays}
        batch.rows, batch.vocabulary, batch.sources = texts["rows"], texts["vocabulary"], texts["sources"]
        total = int(batch.lengths.sum())
        if len(batch.lengths) > len(batch.rows) or any(len(column) != total for column in batch.columns.values()):
            raise ValueError("its columns have different lengths")
    except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(f"{file.name} cannot be read: {error}") from error


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
