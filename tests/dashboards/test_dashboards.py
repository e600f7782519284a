"""Each dashboard with its real package, where that is installed: `make test-trackers` installs all."""

import contextlib
import importlib
import json
import math
import os
import sqlite3
import struct
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

SCORES = [(1, 0.1), (2, 0.2), (3, 0.3), (4, 0.4)]
"""(step, score) of both."""
FULL, LAST = 1, 4
"""Of the parts of a record in a file of wandb's: one that is whole, and one that ends it."""


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
    assert [(event.step, round(event.value, 6)) for event in events.Scalars("critic/score/mean")] == SCORES
    (first, _) = events.Tensors("samples/text_summary")
    text = first.tensor_proto.string_val[0].decode()
    assert text.splitlines()[0] == "prompt|response|score|ground_truth"
    assert "<pre>2 + 2 &#124;</pre>|<pre>&lt;b&gt;4&lt;/b&gt;<br></pre>|<pre>1.0</pre>" in text


def read_wandb(folder: Path) -> None:
    runs = sorted((folder / "wandb").glob("offline-run-*"))
    assert len({run.name.rpartition("-")[2] for run in runs}) == 1, "the resumed one is the same run"
    assert [(step, history["critic/score/mean"]) for run in runs for step, history in wandb_history(run)] == SCORES
    tables = [json.loads(file.read_text()) for run in runs for file in run.glob("files/media/table/samples_*.table.json")]
    assert [table["data"] for table in tables] == [[["2 + 2 |", "<b>4</b>\n", 1.0, ""]]] * 2


def wandb_history(run: Path) -> list[tuple[int, dict[str, Any]]]:
    """(step, numbers) of what an offline run has logged. The file is a log as LevelDB writes it: blocks, with records in parts."""
    records = importlib.import_module("wandb.proto.wandb_internal_pb2")
    (file,) = run.glob("*.wandb")
    data, at, whole, found = file.read_bytes(), 7, b"", []
    while at + 7 <= len(data):
        if (room := 32768 - at % 32768) < 7:
            at += room
            continue
        _, size, part = struct.unpack_from("<IHB", data, at)
        whole += data[at + 7 : at + 7 + size]
        at += 7 + size
        if part in (FULL, LAST):
            record = records.Record()
            record.ParseFromString(whole)
            whole = b""
            if record.WhichOneof("record_type") == "history":
                items = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
                found.append((record.history.step.num, items))
    return found


def read_mlflow(folder: Path) -> None:
    client = importlib.import_module("mlflow").MlflowClient(tracking_uri=f"sqlite:///{folder / 'mlflow.db'}")
    (run,) = client.search_runs([client.get_experiment_by_name("project").experiment_id])
    assert (run.info.run_name, run.info.status) == ("run", "FINISHED")
    history = client.get_metric_history(run.info.run_id, "critic/score/mean")
    assert sorted((metric.step, metric.value) for metric in history) == SCORES
    assert run.data.metrics["val-core/x/acc/mean_at_1"] == 0.5
    assert "strange" not in run.data.metrics
    assert [file.path for file in client.list_artifacts(run.info.run_id, "samples")] == ["samples/2.json", "samples/4.json"]


def read_swanlab(folder: Path) -> None:
    runs = sorted((folder / "swanlab").glob("run-*"))
    assert len({run.name.rpartition("-")[2] for run in runs}) == 1, "the resumed one is the same run"
    lines = [json.loads(line) for run in runs for line in (run / "logs" / "1" / "1000.log").read_text().splitlines()]
    assert [(line["index"], line["data"]) for line in lines] == SCORES, "the first metric"
    texts = [json.loads(file.read_text()) for run in runs for file in (run / "media" / "text").iterdir()]
    assert [[(row["prompt"], row["response"]) for row in text] for text in texts] == [[("2 + 2 |", "<b>4</b>\n")]] * 2


def read_trackio(folder: Path) -> None:
    with contextlib.closing(sqlite3.connect(folder / "trackio" / "project.db")) as database:
        rows = database.execute("SELECT run_id, run_name, step, metrics FROM metrics ORDER BY id").fetchall()
    assert len({run for run, *_ in rows}) == 1, "the resumed one is the same run"
    assert {name for _, name, _, _ in rows} == {"run"}
    logged = [(step, json.loads(metrics)) for _, _, step, metrics in rows]
    assert [(step, metrics["critic/score/mean"]) for step, metrics in logged if "samples" not in metrics] == SCORES
    tables = [metrics["samples"]["_value"] for _, metrics in logged if "samples" in metrics]
    assert [[(row["prompt"], row["response"]) for row in table] for table in tables] == [[("2 + 2 |", "<b>4</b>\n")]] * 2


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
