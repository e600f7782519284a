"""`lockstep.read_run(folder)`: metrics and samples of a run, in Python."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.errors import DataError
from lockstep.tools.report.kept import Batch
from lockstep.tools.report.run_folder import RunFolder

_NOT_FINITE = ("nan", "inf", "-inf")


class RunData:
    """What a run has written until now: `read_run` makes it. A run that goes on is read again by another `read_run`."""

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
            raise DataError(
                f"{self.folder} has no samples of {'the validation at ' * validation}step {step}; it has those of: {kept}"
            )
        batch = self._run.read((step, validation), files)
        if batch is None:
            raise DataError(f"{self.folder}: {self._run.notes[-1]}")
        tokens = _tokens(batch)
        return [row | {"tokens": tokens[i] if i < len(tokens) else None} for i, row in enumerate(batch.rows)]


def read_run(folder: str | os.PathLike[str]) -> RunData:
    """Return the metrics and the kept samples of the run in `folder`. Raises DataError if it is not the folder of a run."""
    return RunData(Path(folder))


def _tokens(batch: Batch) -> list[list[dict[str, Any]]]:
    """For each row with numbers by token a list of its tokens."""
    columns = {"id" if name == "token" else name: column.tolist() for name, column in batch.columns.items()}
    found = []
    ends = np.cumsum(batch.lengths).tolist()
    for start, end in zip([0, *ends[:-1]], ends, strict=False):
        row = [{name: values[i] for name, values in columns.items()} for i in range(start, end)]
        found.append([{"id": token["id"], "text": batch.vocabulary.get(str(token["id"]), "")} | token for token in row])
    return found
