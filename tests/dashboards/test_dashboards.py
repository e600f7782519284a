"""Each dashboard with its real package, where that is installed: `make test-trackers` installs all."""

import importlib
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lockstep.observability.dashboards import DASHBOARDS
from lockstep.observability.trackers import Tracking

RUN = """
import json, math, sys
from pathlib import Path
from lockstep.observability.trackers import Tracking

name, folder, resume = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])
about = {"project_name": "project", "experiment_name": "run", "run_dir": folder, "config": {"lr": 1e-6, "data": {"files": None}}}
with Tracking([name], **about, resume_step=resume) as tracking:
    for step in range((resume or 0) + 1, (resume or 0) + 3):
        tracking.log({"critic/score/mean": step / 10, "val-core/x/acc/mean@1": 0.5, "strange": math.nan}, step)
    tracking.samples([{"prompt": "2 + 2 |", "response": "<b>4</b>\\n", "score": 1.0, "ground_truth": None}], step)
"""


@pytest.mark.parametrize("name", DASHBOARDS)
def test_a_run_and_its_resume_reach_the_real_dashboard(name: str, tmp_path: Path) -> None:
    """In processes of their own: these packages keep threads and hooks. Everything offline, in the run's folder."""
    pytest.importorskip(DASHBOARDS[name].package)
    local = {"WANDB_MODE": "offline", "SWANLAB_MODE": "local", "TRACKIO_DIR": str(tmp_path / "trackio"), "HOME": str(tmp_path)}
    for resume in (None, 2):
        done = subprocess.run(
            [sys.executable, "-W", "error:tracker", "-c", RUN, name, str(tmp_path), json.dumps(resume)],
            env={**os.environ, **local, "GIT_PYTHON_REFRESH": "quiet"},
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
        assert "is dropped" not in done.stderr
    READ[name](tmp_path)


def read_tensorboard(folder: Path) -> None:
    module = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    events = module.EventAccumulator(str(folder / "tensorboard")).Reload()
    assert [(event.step, round(event.value, 6)) for event in events.Scalars("critic/score/mean")] == [
        (1, 0.1), (2, 0.2), (3, 0.3), (4, 0.4),
    ]  # fmt: skip
    (first, _) = events.Tensors("samples/text_summary")
    text = first.tensor_proto.string_val[0].decode()
    assert text.splitlines()[0] == "prompt|response|score|ground_truth"
    assert "<pre>2 + 2 &#124;</pre>|<pre>&lt;b&gt;4&lt;/b&gt;<br></pre>|<pre>1.0</pre>" in text


def read_wandb(folder: Path) -> None:
    runs = list((folder / "wandb").glob("offline-run-*"))
    assert len({run.name.rpartition("-")[2] for run in runs}) == 1, "the resumed one is the same run"
    assert list((folder / "wandb").glob("offline-run-*/files/media/table/samples_*.table.json"))


def read_mlflow(folder: Path) -> None:
    client = importlib.import_module("mlflow").MlflowClient(tracking_uri=f"sqlite:///{folder / 'mlflow.db'}")
    (run,) = client.search_runs([client.get_experiment_by_name("project").experiment_id])
    assert (run.info.run_name, run.info.status) == ("run", "FINISHED")
    history = client.get_metric_history(run.info.run_id, "critic/score/mean")
    assert sorted((metric.step, metric.value) for metric in history) == [(1, 0.1), (2, 0.2), (3, 0.3), (4, 0.4)]
    assert run.data.metrics["val-core/x/acc/mean_at_1"] == 0.5
    assert "strange" not in run.data.metrics
    assert [file.path for file in client.list_artifacts(run.info.run_id, "samples")] == ["samples/2.json", "samples/4.json"]


def read_swanlab(folder: Path) -> None:
    assert any(path.is_file() and path.stat().st_size for path in (folder / "swanlab").rglob("*"))


def read_trackio(folder: Path) -> None:
    assert list((folder / "trackio").glob("project*"))


READ: dict[str, Any] = {
    "tensorboard": read_tensorboard,
    "wandb": read_wandb,
    "mlflow": read_mlflow,
    "swanlab": read_swanlab,
    "trackio": read_trackio,
}


def test_tensorboard_takes_numbers_that_are_not_finite(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    with Tracking(["tensorboard"], project_name="p", experiment_name="e", run_dir=tmp_path, config={}) as tracking:
        tracking.log({"a": math.inf}, step=1)
