"""A capsule: one JSON file from which steps of a run can be done again on another machine (`lockstep replay`).

```text
recipe, config     what was run, without what is secret
versions           of Python and the packages, and the device
step, from_step    the last step, and the checkpoint that it is reached from (0: the model of the configuration)
weights            the name of that checkpoint and the SHA-256 of its manifest, which has that of every file
keys               seed, the numbers of left-out batches, rows in the files: what random numbers and the order of rows depend on
rows               the rows of the files that the steps read, by their number there
metrics            of every step that ended
episodes           what environments said in these steps, where the run had some
failure            what ended the last step, where something did
```
"""

from __future__ import annotations

import dataclasses
import gzip
import json
import platform
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.checkpoint import folders
from lockstep.checkpoint.manifest import MANIFEST, entry_of
from lockstep.config.identity import redacted
from lockstep.data.schedule import PromptSchedule, batch_at
from lockstep.errors import ConfigError, DataError

if TYPE_CHECKING:
    from lockstep.trainer.run.loop import Run

FORMAT = 1
_PACKAGES = ("lockstep-rl", "torch", "transformers", "numpy", "ray", "vllm", "megatron-core", "torchtitan", "veomni")


def write_capsule(run: Run, step: int, failure: str | None = None, path: Path | None = None) -> Path:
    """Write the capsule of a step, or of one that has failed, into the run's folder (or to `path`); returns the file.

    Reads the run's folder and its data; no model is needed. Raises ConfigError where the rows cannot be told, DataError where the step has
    no metrics.
    """
    run_dir = run.section.run_dir
    start = next((f for f in reversed(folders.found(run_dir)) if folders.read_state(f)["global_steps"] < step), None)
    state = folders.read_state(start) if start is not None else {"global_steps": 0}
    metrics = [row for row in _logged(run_dir) if state["global_steps"] < row["step"] <= step]
    if failure is None and step not in {row["step"] for row in metrics}:
        raise DataError(f"{run_dir / 'metrics.jsonl'} has no step {step}")
    dataset, schedule = run.training_data()
    first = state.get("num_prompt_batches", state["global_steps"])
    taken = _batches_taken(run.config, metrics, step - state["global_steps"], schedule.steps_per_epoch)
    last = run._position() if failure is not None else first + taken
    positions = range(first, max(last, first + 1))
    capsule = {
        "lockstep_capsule": FORMAT,
        "recipe": type(run.config).__name__,
        "config": redacted(dataclasses.asdict(run.config)),
        "versions": _versions(run.section.device),
        "step": step,
        "from_step": state["global_steps"],
        "weights": _weights(start),
        "keys": {
            "seed": run.section.seed,
            "left_out": list(run.left_out),
            "num_rows": len(dataset._files),
            "num_used": len(dataset),
        },
        "rows": _rows(dataset, schedule, positions, run.left_out),
        "episodes": _episodes(run_dir / "episodes", positions, run.left_out),
        "metrics": metrics,
        "failure": failure,
    }
    path = path or run_dir / f"capsule_step_{step}.json"
    path.write_text(json.dumps(capsule, indent=1, default=str))
    return path


def keep_failed_step(run: Run, error: Exception) -> None:
    """Write the capsule of the step that `error` has ended, and say where it is."""
    step = run.global_steps + 1
    try:
        path = write_capsule(run, step, str(error))
        run.display.message(f"the step is in {path}: lockstep replay {path}")
    except Exception as failure:  # the step's own error is what the user has to see
        run.display.message(f"warning: no capsule of step {step} was written: {failure}")


def read_capsule(path: Path) -> dict[str, Any]:
    """The contents. Raises DataError for a file that is no capsule, has another version, or lacks a part that a replay needs."""
    try:
        found = json.loads(path.read_text(), parse_int=_read_int)
        if found["lockstep_capsule"] != FORMAT:
            raise DataError(f"{path} is a capsule of format {found['lockstep_capsule']}; this version reads {FORMAT}")
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise DataError(f"{path} is not a capsule: {error!r}; lockstep capsule RUN --step N writes one") from error
    found.setdefault("episodes", None)
    for place, is_valid in _SHAPE.items():
        if not _holds(is_valid, found):
            raise DataError(f"{path} is not a capsule: {place} is missing or malformed; lockstep capsule RUN --step N writes one")
    return dict(found)


_SHAPE: dict[str, Callable[[Any], bool]] = {
    "recipe": lambda capsule: isinstance(capsule["recipe"], str),
    "config": lambda capsule: isinstance(capsule["config"], dict) and isinstance(capsule["config"]["trainer"], dict),
    "step": lambda capsule: 0 <= capsule["from_step"] < capsule["step"] and _are(int, capsule["from_step"], capsule["step"]),
    "weights": lambda capsule: capsule["weights"] is None or _are(str, capsule["weights"]["name"], capsule["weights"]["sha256"]),
    "keys": lambda capsule: _are(int, *(capsule["keys"][name] for name in ("seed", "num_rows", "num_used"))),
    "keys.left_out": lambda capsule: isinstance(left := capsule["keys"]["left_out"], list) and _are(int, *left),
    "rows": lambda capsule: _are(dict, *capsule["rows"].values()) and bool(capsule["rows"]),
    "rows' numbers": lambda capsule: all(number == str(int(number)) for number in capsule["rows"]),
    "keys.num_rows": lambda capsule: (
        0 <= min(map(int, capsule["rows"])) <= max(map(int, capsule["rows"])) < capsule["keys"]["num_rows"]
    ),
    "metrics": lambda capsule: isinstance(capsule["metrics"], list) and all(type(row["step"]) is int for row in capsule["metrics"]),
    "episodes": lambda capsule: capsule["episodes"] is None or _are_episodes(capsule["episodes"]),
    "failure": lambda capsule: capsule["failure"] is None or isinstance(capsule["failure"], str),
}
"""Part of a capsule -> whether it is as a replay reads it; an error means that it is not."""


def _holds(is_valid: Callable[[Any], bool], capsule: Any) -> bool:
    try:
        return is_valid(capsule)
    except (LookupError, ValueError, TypeError, AttributeError):
        return False


def _are(kind: type, *values: Any) -> bool:
    return all(type(value) is kind for value in values)


def _are_episodes(value: Any) -> bool:
    kinds = value["kinds"]
    are_kinds = all(_are(list, kind["tools"]) and _are(bool, kind["is_judged"]) for kind in kinds.values())
    are_named = all(isinstance(tool["function"]["name"], str) for kind in kinds.values() for tool in kind["tools"])
    played = value["played"]
    return are_kinds and are_named and all(_are(int, line["index"], line["sample"], line["seed"]) for line in played)


def _read_int(digits: str) -> int | float:
    """A whole number; one that no metric can be as a float, which may be infinite."""
    return int(digits) if len(digits) < 100 else float(digits)


def weights_differ(capsule: Mapping[str, Any], folder: Path) -> bool:
    """Whether a checkpoint is another one than that of the capsule."""
    return bool(_weights(folder) is None or _weights(folder)["sha256"] != capsule["weights"]["sha256"])  # type: ignore[index]


def _weights(folder: Path | None) -> dict[str, str] | None:
    if folder is None:
        return None
    return {"name": str(folder.resolve()), "sha256": entry_of(folder / MANIFEST)["sha256"]}


def _rows(dataset: Any, schedule: PromptSchedule, positions: range, left_out: list[int]) -> dict[str, Any]:
    """Number in the files -> row, of the batches at these positions."""
    if not hasattr(dataset, "_files") or not hasattr(dataset, "_rows"):
        raise ConfigError(f"a capsule holds rows of files, and {type(dataset).__name__} does not say which they are")
    numbers = [int(dataset._rows[place]) for position in positions for place in schedule.batch(batch_at(position, left_out))]
    return {str(number): row for number, row in zip(numbers, dataset._files.rows(numbers), strict=True)}


def _episodes(folder: Path, positions: range, left_out: list[int]) -> dict[str, Any] | None:
    """What environments said (lockstep/agents/recording.py) of the batches at these positions; None where nothing was recorded."""
    files = [folder / f"{batch_at(position, left_out) + 1}.jsonl.gz" for position in positions]
    lines = [line for file in files if file.is_file() for line in gzip.decompress(file.read_bytes()).decode().splitlines()]
    return {"kinds": json.loads((folder / "kinds.json").read_text()), "played": list(map(json.loads, lines))} if lines else None


def _batches_taken(config: Any, metrics: list[dict[str, Any]], num_steps: int, per_epoch: int) -> int:
    """The batches of prompts that these steps took; for a step whose metrics are lost, the most that one takes."""
    groups = getattr(getattr(config, "algorithm", None), "filter_groups", None)
    if groups is None or not groups.enable:
        return num_steps
    known = [int(row["training/num_gen_batches"]) for row in metrics if "training/num_gen_batches" in row]
    return sum(known) + (num_steps - len(known)) * (groups.max_num_gen_batches or per_epoch)


def _logged(run_dir: Path) -> list[dict[str, Any]]:
    file = run_dir / "metrics.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []
    return [row for row in rows if "training/global_step" in row]


def _versions(device: str) -> dict[str, str]:
    found = {"python": platform.python_version(), "machine": platform.machine(), "system": platform.system(), "device": device}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
