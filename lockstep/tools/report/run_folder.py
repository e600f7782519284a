"""RunFolder: what is new in the folder of one run. `read_run`: all that a run has written, for Python."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from lockstep.config.load import read_yaml
from lockstep.config.reference import ROOTS, keys
from lockstep.errors import ConfigError, DataError
from lockstep.observability.statistics import wilson_interval
from lockstep.tools.report.run_files import JsonLines, SampleBatch, find_files, num_bytes, read_batch

METRICS = "metrics.jsonl"
_MAX_BYTES = 8_000_000_000
"""The most that the arrays with samples of one run may be."""
_MAX_STEP = 1 << 31
_MAX_WHOLE = 1 << 53
"""The largest whole number that a browser reads exactly."""
_MEAN = re.compile(r"val-core/(.+)/(?:acc|reward)/mean@\d+")
_NOT_FINITE = ("nan", "inf", "-inf")


class RunFolder:
    """Reads each step, alarm and sample of a run once. Raises DataError if `folder` is not the folder of a run."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder = folder
        self.name = name
        self.settings: dict[str, Any] = {"recipe": "", "keys": [], "values": {}}
        self.alarms: list[dict[str, Any]] = []
        self.notes: list[str] = []
        """What could not be read."""
        self.last_step = -1
        self._bytes_left = _MAX_BYTES
        self._metrics = JsonLines(folder / METRICS)
        self._alarms = JsonLines(folder / "alarms.jsonl")
        self._read: set[tuple[int, bool]] = set()
        self._counts: dict[int, dict[str, dict[str, Any]]] = {}
        if not (folder / METRICS).is_file():
            raise DataError(_not_a_run(folder))
        try:
            self.settings = read_settings(folder / "config.yaml")
        except ConfigError as error:
            self.notes.append(str(error))

    @property
    def total_steps(self) -> int | None:
        """The steps that the run is to have, if its configuration says so."""
        total = self.settings["values"].get("trainer.total_training_steps")
        return total if type(total) is int and total > 0 else None

    def was_rewritten(self) -> bool:
        """Return whether the run resumed from an earlier step, so that everything has to be read again."""
        return self._metrics.was_rewritten()

    def new_steps(self) -> list[dict[str, Any]]:
        """Return the lines of metrics.jsonl that are new. Reads new alarms too, into `alarms`."""
        self.alarms += self._alarms.read_new()
        rows = [row for row in self._metrics.read_new() if _has_step(row)]
        self.last_step = max([self.last_step, *(row["step"] for row in rows)])
        return rows

    def new_files(self) -> dict[tuple[int, bool], list[Path]]:
        """Return the files with samples of finished steps that were not returned before. Files of later steps are of an older run."""
        values = self.settings["values"]
        others = {}
        for split, setting in (("train", "trainer.rollout_data_dir"), ("val", "trainer.validation_data_dir")):
            if values.get(setting):
                others[split] = self._moved(Path(str(values[setting])))
        new = {}
        for key, files in find_files(self.folder, others).items():
            step, _ = key
            if step <= self.last_step and key not in self._read:
                new[key] = files
        self._read |= new.keys()
        return new

    def read(self, key: tuple[int, bool], files: list[Path]) -> SampleBatch | None:
        """Return the samples in the files; None, and leave a note, if they cannot be read."""
        step, is_validation = key
        values = self.settings["values"]
        size = sum(num_bytes(file) for file in files if file.suffix == ".npz")
        if size > self._bytes_left:
            limit = f"{_MAX_BYTES / 1e9:.0f} GB"
            self.notes.append(f"the samples of step {step} and later ones are not shown: together they are over {limit}")
            self._bytes_left = 0
            return None
        self._bytes_left -= size
        gamma = values.get("algorithm.gamma", 1.0)
        discount = float(gamma) if isinstance(gamma, int | float) else 1.0
        by_turn = values.get("algorithm.discount_unit") == "turn"
        try:
            batch = read_batch(step, is_validation, files, discount, by_turn)
        except ValueError as error:
            self.notes.append(str(error))
            return None
        if batch.is_validation:
            self._counts[batch.step] = batch.sources
        return batch

    def intervals(self, row: dict[str, Any]) -> dict[str, list[float]]:
        """Return validation metric -> its 95 % interval at that step: the run's own, else Wilson's if every reward was 0 or 1."""
        found = {}
        for name, value in row.items():
            if not name.startswith("val-core/") or not isinstance(value, int | float):
                continue
            interval_name = name.replace("val-core/", "val-aux/", 1)
            low = row.get(f"{interval_name}/low")
            high = row.get(f"{interval_name}/high")
            if isinstance(low, int | float) and isinstance(high, int | float):
                found[name] = [low, high]
                continue
            match = _MEAN.fullmatch(name)
            count = self._counts.get(row["step"], {}).get(match[1], {}) if match else {}
            if count.get("is_binary"):
                # The samples of one prompt are not independent: counting prompts is on the safe side.
                found[name] = list(wilson_interval(value * count["prompts"], count["prompts"]))
        return found

    def problems(self) -> list[str]:
        """Return what the page should say about files that could not be read."""
        problems = list(self.notes)
        for file in (self._metrics, self._alarms):
            if file.num_unreadable:
                noun = "line" if file.num_unreadable == 1 else "lines"
                problems.append(f"{file.path.name}: {file.num_unreadable} {noun} cannot be read")
        return problems

    def _moved(self, folder: Path) -> Path:
        """Return a folder that the configuration names, or the folder of the same name inside the run's."""
        return folder if folder.is_dir() else self.folder / folder.name


def _has_step(row: dict[str, Any]) -> bool:
    return type(row.get("step")) is int and 0 <= row["step"] < _MAX_STEP


def _not_a_run(folder: Path) -> str:
    if not folder.is_dir():
        return f"{folder} is not a folder; give the folder of a run, such as checkpoints/lockstep/ppo"
    inside = sorted(str(path.parent) for pattern in ("*", "*/*") for path in folder.glob(f"{pattern}/{METRICS}"))
    hint = f"name one of: {', '.join(inside[:8])}" if inside else "a run writes it with its first step"
    return f"{folder} is not the folder of a run: there is no {METRICS} in it; {hint}"


# -- settings --------------------------------------------------------------------------------------------------------------------------


def read_settings(file: Path) -> dict[str, Any]:
    """Return the settings of a run's config.yaml beside the defaults.

    ```text
    recipe    the algorithm, or the command if that has only one
    keys      [[key, value, default, differs, meaning], ...], values as JSON texts
    values    key -> value
    ```

    A key that this version does not know has no default and no meaning. Raises ConfigError if the file is not YAML.
    """
    values = {key: _plain(value) for key, value in _leaves(OmegaConf.to_container(read_yaml(file), resolve=False))}
    known = {command: {key: (default, meaning) for key, default, meaning in keys(root)} for command, root in ROOTS.items()}
    command = max(known, key=lambda name: len(values.keys() & known[name].keys()))
    rows = []
    for key in dict.fromkeys((*known[command], *values)):
        default, meaning = known[command].get(key, (None, ""))
        value = _text(values.get(key, default))
        rows.append([key, value, _text(default), value != _text(default), meaning])
    return {"recipe": _algorithm(values) if command == "ppo" else command, "keys": rows, "values": values}


def _algorithm(values: dict[str, Any]) -> str:
    """Return "ppo", or for its relatives the name of the estimator or, if that is grpo's, of the loss."""
    estimator = str(values.get("algorithm.adv_estimator", "gae"))
    loss = str(values.get("actor_rollout_ref.actor.policy_loss.loss_mode", "vanilla"))
    name = loss if estimator == "grpo" and loss != "vanilla" else estimator
    return "ppo" if name == "gae" else name.rpartition(":")[2]


def _leaves(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from _leaves(inner, f"{key}.{name}" if key else str(name))
    else:
        yield key, value


def _plain(value: Any) -> Any:
    """Return the value as JSON holds it: a date, a number that is not finite and a number beyond floats become texts."""
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        return str(value)
    return str(value) if isinstance(value, int) and abs(value) > _MAX_WHOLE else value


def _text(value: Any) -> str:
    return json.dumps(value, default=str)


# -- for Python ------------------------------------------------------------------------------------------------------------------------


class RunData:
    """What a run has written until now, made by `read_run`. Call `read_run` again to see what came later."""

    def __init__(self, folder: Path) -> None:
        self._run = RunFolder(folder, folder.name)
        self.folder = folder
        self.metrics: list[dict[str, Any]] = [
            {name: float(value) if value in _NOT_FINITE else value for name, value in row.items()} for row in self._run.new_steps()
        ]
        """A dict for each line of metrics.jsonl: "step", "time", and the metrics of docs/metrics.md."""
        self.settings: dict[str, Any] = dict(self._run.settings["values"])
        """Key -> value, as config.yaml has them."""
        self._files = self._run.new_files()

    def sampled_steps(self, validation: bool = False) -> list[int]:
        """Return the steps whose samples were kept."""
        return [step for step, is_validation in self._files if is_validation == validation]

    def samples(self, step: int, validation: bool = False) -> list[dict[str, Any]]:
        """Return the samples of a step, or of the validation after it, as dicts.

        ```text
        prompt, response, truth    texts; truth is what the row's ground_truth is
        reward, length, finish     a number or None where it is missing; tokens of the response; why it ended
        failure                    why the reward is missing, or None
        said                       what the reward function returned beside the score
        group                      the same for samples of the same prompt
        tokens                     None, or a list with a dict for each token: "id", "text", and the numbers of docs/report.md
        ```

        Raises DataError if none were kept of this step, or if they cannot be read.
        """
        files = self._files.get((step, validation))
        if files is None:
            kept = ", ".join(map(str, self.sampled_steps(validation))) or "none"
            what = f"the validation at step {step}" if validation else f"step {step}"
            raise DataError(f"{self.folder} has no samples of {what}; it has those of: {kept}")
        batch = self._run.read((step, validation), files)
        if batch is None:
            raise DataError(f"{self.folder}: {self._run.notes[-1]}")
        tokens = _tokens(batch)
        return [row | {"tokens": tokens[i] if i < len(tokens) else None} for i, row in enumerate(batch.rows)]


def read_run(folder: str | os.PathLike[str]) -> RunData:
    """Return the metrics and the kept samples of the run in `folder`. Raises DataError if it is not the folder of a run."""
    return RunData(Path(folder))


def _tokens(batch: SampleBatch) -> list[list[dict[str, Any]]]:
    """Return the tokens of each row that has numbers by token."""
    columns = {name: column.tolist() for name, column in batch.columns.items() if name != "token"}
    ids = batch.columns["token"].tolist() if batch.columns else []
    rows = []
    for start, end in batch.spans():
        row = []
        for i in range(start, end):
            token = {"id": ids[i], "text": batch.vocabulary.get(str(ids[i]), "")}
            row.append(token | {name: values[i] for name, values in columns.items()})
        rows.append(row)
    return rows
