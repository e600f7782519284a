"""RunFolder: what is new in the folder of one run."""

import re
from pathlib import Path
from typing import Any

from lockstep.errors import ConfigError, DataError
from lockstep.observability.statistics import wilson_interval
from lockstep.tools.report.kept import Batch, find_files, num_bytes, read_batch
from lockstep.tools.report.settings import read_settings
from lockstep.tools.report.tail import JsonLines

METRICS = "metrics.jsonl"
_MAX_BYTES = 8_000_000_000
"""The most that the arrays with samples of one run may be."""
_MEAN = re.compile(r"val-core/(.+)/(?:acc|reward)/mean@\d+")


class RunFolder:
    """Reads each step, alarm and sample of a run once. Raises DataError where `folder` is no run's."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name = folder, name
        self.settings: dict[str, Any] = {"recipe": "", "keys": [], "values": {}}
        self.alarms: list[dict[str, Any]] = []
        self.notes: list[str] = []
        """What could not be read."""
        self.last_step = -1
        self._bytes_left = _MAX_BYTES
        self._metrics, self._alarms = JsonLines(folder / METRICS), JsonLines(folder / "alarms.jsonl")
        self._read: set[tuple[int, bool]] = set()
        self._counts: dict[int, dict[str, dict[str, Any]]] = {}
        if not (folder / METRICS).is_file():
            raise DataError(_no_run(folder))
        self._read_settings()

    @property
    def total_steps(self) -> int | None:
        """The steps that the run is to have, where its configuration says so."""
        total = self.settings["values"].get("trainer.total_training_steps")
        return total if type(total) is int and total > 0 else None

    def was_rewritten(self) -> bool:
        """Whether the run went on from an earlier step, so that all has to be read anew."""
        return self._metrics.was_rewritten()

    def new_steps(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl that are new. Reads new alarms too, into `alarms`."""
        self.alarms += self._alarms.read_new()
        rows = [row for row in self._metrics.read_new() if type(row.get("step")) is int and 0 <= row["step"] < 1 << 31]
        self.last_step = max([self.last_step, *(row["step"] for row in rows)])
        return rows

    def new_files(self) -> dict[tuple[int, bool], list[Path]]:
        """The files with samples of steps that are done, and were not returned before. Files of later steps are of an older run."""
        values = self.settings["values"]
        named = {"train": values.get("trainer.rollout_data_dir"), "val": values.get("trainer.validation_data_dir")}
        others = {split: self._moved(Path(str(path))) for split, path in named.items() if path}
        new = {key: files for key, files in find_files(self.folder, others).items() if key[0] <= self.last_step}
        new = {key: files for key, files in new.items() if key not in self._read}
        self._read |= new.keys()
        return new

    def read(self, key: tuple[int, bool], files: list[Path]) -> Batch | None:
        """The samples in those files; None, and a note, where they cannot be read."""
        values = self.settings["values"]
        gamma, by_turn = values.get("algorithm.gamma", 1.0), values.get("algorithm.discount_unit") == "turn"
        size = sum(num_bytes(file) for file in files if file.suffix == ".npz")
        if size > self._bytes_left:
            self.notes.append(
                f"the samples of step {key[0]} and later ones are not shown: together they are over {_MAX_BYTES / 1e9:.0f} GB"
            )
            self._bytes_left = 0
            return None
        self._bytes_left -= size
        try:
            batch = read_batch(*key, files, float(gamma) if isinstance(gamma, int | float) else 1.0, by_turn)
        except ValueError as error:
            self.notes.append(str(error))
            return None
        if batch.is_validation:
            self._counts[batch.step] = batch.sources
        return batch

    def intervals(self, row: dict[str, Any]) -> dict[str, list[float]]:
        """Validation metric -> its 95 % interval at that step: as the run wrote it, else Wilson's where every reward was 0 or 1."""
        found = {}
        for name, value in row.items():
            if not name.startswith("val-core/") or not isinstance(value, int | float):
                continue
            low, high = (row.get(f"{name.replace('val-core/', 'val-aux/', 1)}/{end}") for end in ("low", "high"))
            match = _MEAN.fullmatch(name)
            count = self._counts.get(row["step"], {}).get(match[1], {}) if match else {}
            if isinstance(low, int | float) and isinstance(high, int | float):
                found[name] = [low, high]
            elif count.get("is_binary"):
                # The samples of one prompt are not independent: prompts are counted, which is on the safe side.
                found[name] = list(wilson_interval(value * count["prompts"], count["prompts"]))
        return found

    def problems(self) -> list[str]:
        """What the page should say about files that could not be read."""
        cut = [
            f"{file.path.name}: {file.num_unreadable} line{'s' if file.num_unreadable > 1 else ''} cannot be read"
            for file in (self._metrics, self._alarms)
            if file.num_unreadable
        ]
        return self.notes + cut

    def _read_settings(self) -> None:
        try:
            self.settings = read_settings(self.folder / "config.yaml")
        except ConfigError as error:
            self.notes.append(str(error))

    def _moved(self, folder: Path) -> Path:
        """A folder that the configuration names, or the one of that name inside the run's."""
        return folder if folder.is_dir() else self.folder / folder.name


def _no_run(folder: Path) -> str:
    if not folder.is_dir():
        return f"{folder} is not a folder; give the folder of a run, such as checkpoints/lockstep/ppo"
    inside = sorted(str(path.parent) for pattern in ("*", "*/*") for path in folder.glob(f"{pattern}/{METRICS}"))
    hint = f"name one of: {', '.join(inside[:8])}" if inside else "a run writes it with its first step"
    return f"{folder} is not the folder of a run: there is no {METRICS} in it; {hint}"
