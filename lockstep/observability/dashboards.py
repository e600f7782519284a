"""The dashboards of others, each as a Tracker. A package is imported when its dashboard is started."""

import html
import importlib
import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lockstep.errors import MissingExtra

Samples = Sequence[Mapping[str, Any]]
"""What the model wrote: rows with the same columns, such as prompt, response, score."""


class TensorBoard:
    """<run_dir>/tensorboard."""

    package = "tensorboard"
    extra = "logging"

    def __init__(
        self, *, project_name: str, experiment_name: str, run_dir: Path, config: Mapping[str, Any], resume_step: int | None
    ) -> None:
        importlib.import_module(self.package)  # torch's module of tensorboard is there without it
        # Older event files in the folder: TensorBoard hides their points from this step on.
        first_step = 0 if resume_step is None else resume_step + 1
        writer = importlib.import_module("torch.utils.tensorboard").SummaryWriter
        self._writer = writer(str(run_dir / "tensorboard"), purge_step=first_step)
        self._writer.add_text("config", f"<pre>{json.dumps(dict(config), indent=2, default=str)}</pre>", resume_step or 0)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """See Tracker."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def samples(self, rows: Samples, step: int) -> None:
        """A table of Markdown, in which nothing that the model wrote is markup."""
        columns, data = _table(rows)
        cells = [
            [f"<pre>{html.escape(str(value))}</pre>".replace("|", "&#124;").replace("\n", "<br>") for value in row] for row in data
        ]
        lines = ["|".join(columns), "|".join("-" * len(columns)), *map("|".join, cells)]
        self._writer.add_text("samples", "\n".join(lines), step)
        self._writer.flush()

    def finish(self, exit_code: int) -> None:
        """See Tracker."""
        self._writer.close()


class Wandb:
    """Weights & Biases, project `project_name`, run `experiment_name`; WANDB_MODE=offline keeps it in the run's folder.

    SwanLab and trackio have the same interface, but for what their classes say.
    """

    package = "wandb"
    extra = "logging"
    identity = "id"
    """What of a run names it to a later process."""

    def __init__(
        self, *, project_name: str, experiment_name: str, run_dir: Path, config: Mapping[str, Any], resume_step: int | None
    ) -> None:
        self._module = importlib.import_module(self.package)
        # A resumed run continues the same curve. Steps it repeats are there already, and ignored.
        id_file = run_dir / f"{self.package}_run_id.txt"
        run_id = id_file.read_text().strip() if resume_step is not None and id_file.exists() else None
        self._run = self._start(project_name, experiment_name, run_dir, dict(config), run_id)
        id_file.write_text(f"{getattr(self._run, self.identity)}\n")

    def _start(self, project: str, name: str, run_dir: Path, config: dict[str, Any], run_id: str | None) -> Any:
        return self._module.init(project=project, name=name, dir=str(run_dir), config=config, id=run_id, resume="allow")

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """See Tracker."""
        self._run.log(dict(metrics), step=step)

    def samples(self, rows: Samples, step: int) -> None:
        """See Tracker."""
        columns, data = _table(rows)
        self._run.log({"samples": self._module.Table(columns=columns, data=data)}, step=step)

    def finish(self, exit_code: int) -> None:
        """See Tracker."""
        self._run.finish(exit_code=exit_code)


class SwanLab(Wandb):
    """SwanLab; SWANLAB_MODE=local or offline keeps it in <run_dir>/swanlab."""

    package = "swanlab"
    extra = "swanlab"

    def _start(self, project: str, name: str, run_dir: Path, config: dict[str, Any], run_id: str | None) -> Any:
        config = json.loads(json.dumps(config, default=str))
        folder = run_dir / "swanlab"
        folder.mkdir(exist_ok=True)
        resume: Any = {"id": run_id, "resume": "allow"} if run_id else {}
        return self._module.init(project=project, name=name, log_dir=str(folder), config=config, **resume)

    def samples(self, rows: Samples, step: int) -> None:
        """One text: SwanLab has no tables."""
        self._run.log({"samples": self._module.Text(json.dumps(list(rows), indent=1, default=str, ensure_ascii=False))}, step=step)

    def finish(self, exit_code: int) -> None:
        """See Tracker."""
        self._module.finish(state="crashed" if exit_code else "success")


class Trackio(Wandb):
    """trackio, on this machine: `trackio show` opens it; TRACKIO_DIR says where it is kept.

    It goes on with the newest run of a name, and takes no id.
    """

    package = "trackio"
    extra = "trackio"
    identity = "name"

    def _start(self, project: str, name: str, run_dir: Path, config: dict[str, Any], run_id: str | None) -> Any:
        config = json.loads(json.dumps(config, default=str))
        return self._module.init(
            project=project, name=run_id or name, config=config, resume="allow" if run_id else "never", embed=False
        )

    def finish(self, exit_code: int) -> None:
        """See Tracker."""
        self._run.finish()


class MLflow:
    """MLflow at MLFLOW_TRACKING_URI, or in <run_dir>/mlflow.db (`mlflow ui --backend-store-uri sqlite:///...` opens it).

    The experiment is `project_name`, the run `experiment_name`.
    """

    package = "mlflow"
    extra = "mlflow"

    def __init__(
        self, *, project_name: str, experiment_name: str, run_dir: Path, config: Mapping[str, Any], resume_step: int | None
    ) -> None:
        module = importlib.import_module(self.package)
        self._entities = importlib.import_module("mlflow.entities")
        server = os.environ.get("MLFLOW_TRACKING_URI")
        folder = run_dir.resolve()
        self._client = module.MlflowClient(tracking_uri=server or f"sqlite:///{folder / 'mlflow.db'}")
        id_file = run_dir / "mlflow_run_id.txt"
        if resume_step is not None and id_file.exists():
            self._id = id_file.read_text().strip()
            self._client.update_run(self._id, status="RUNNING")
            return
        found = self._client.get_experiment_by_name(project_name)
        files = None if server else (folder / "mlartifacts").as_uri()
        experiment = found.experiment_id if found else self._client.create_experiment(project_name, artifact_location=files)
        self._id = self._client.create_run(experiment, run_name=experiment_name).info.run_id
        self._client.log_dict(self._id, json.loads(json.dumps(dict(config), default=str)), "config.json")
        id_file.write_text(f"{self._id}\n")

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """See Tracker. MLflow takes no @ in a name, and no number that is not finite."""
        metric = self._entities.Metric
        at = int(1000 * time.time())
        finite = {name.replace("@", "_at_"): float(value) for name, value in metrics.items() if math.isfinite(value)}
        self._client.log_batch(self._id, metrics=[metric(name, value, at, step) for name, value in finite.items()])

    def samples(self, rows: Samples, step: int) -> None:
        """A file a step, of the form that `mlflow.load_table` reads."""
        columns, data = _table(rows)
        self._client.log_dict(self._id, {"columns": columns, "data": data}, f"samples/{step}.json")

    def finish(self, exit_code: int) -> None:
        """See Tracker."""
        self._client.set_terminated(self._id, "FAILED" if exit_code else "FINISHED")


DASHBOARDS: dict[str, Any] = {"tensorboard": TensorBoard, "wandb": Wandb, "mlflow": MLflow, "swanlab": SwanLab, "trackio": Trackio}
"""Name in trainer.logger -> what starts it."""


def check_installed(name: str) -> None:
    """Raise MissingExtra unless the dashboard's package can be found. Imports nothing of it."""
    dashboard = DASHBOARDS[name]
    try:
        spec = find_spec(dashboard.package)
    except ValueError:  # a module without a spec stands for it
        spec = None
    if spec is None or spec.origin is None:  # a folder of that name, as wandb leaves behind, has no file of its own
        raise MissingExtra(f"trainer.logger={name}", dashboard.package, dashboard.extra)


def _table(rows: Samples) -> tuple[list[str], list[list[Any]]]:
    """The columns and the cells; what is no number is text."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    cells = [[row.get(name) for name in columns] for row in rows]
    return columns, [
        [cell if isinstance(cell, int | float) else "" if cell is None else str(cell) for cell in row] for row in cells
    ]
