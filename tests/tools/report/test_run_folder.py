"""A run in Python."""

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
from helpers.report_run import make_run

import lockstep
from lockstep.errors import DataError

PAGE = Path(__file__).parents[3] / "docs" / "report.md"


def test_metrics_and_samples_are_those_of_the_files(tmp_path):
    folder = make_run(tmp_path / "run")
    run = lockstep.read_run(str(folder))
    assert [row["step"] for row in run.metrics] == [0, 1, 2, 3, 4, 5, 6]
    assert math.isnan(run.metrics[2]["actor/grad_norm"])
    assert run.settings["trainer.seed"] == 7
    assert (run.sampled_steps(), run.sampled_steps(validation=True)) == ([1, 2, 3, 4, 5, 6], [0, 6])
    arrays = np.load(folder / "samples/train_2.npz")
    texts = json.loads(arrays["rows"].tobytes())
    samples = run.samples(2)
    assert samples == run.samples(2)
    assert [sample["prompt"] for sample in samples] == [row["prompt"] for row in texts["rows"]]
    assert samples[7]["reward"] is None
    tokens = [token for sample in samples for token in sample["tokens"]]
    assert [token["id"] for token in tokens] == arrays["tokens"].tolist()
    assert [token["advantage"] for token in tokens] == arrays["advantages"].tolist()
    assert [token["text"] for token in tokens] == [texts["vocabulary"][str(token)] for token in arrays["tokens"]]
    assert "".join(token["text"] for token in samples[0]["tokens"]) == samples[0]["response"]


def test_what_is_not_there_is_an_error(tmp_path):
    run = lockstep.read_run(make_run(tmp_path / "run"))
    with pytest.raises(DataError, match=r"step 9; it has those of: 1, 2"):
        run.samples(9)
    (tmp_path / "run/samples/train_2.npz").write_bytes(b"PK")
    with pytest.raises(DataError, match="train_2"):
        run.samples(2)
    with pytest.raises(DataError, match="not a folder"):
        lockstep.read_run(tmp_path / "none")


def test_the_example_of_the_docs_runs(tmp_path, monkeypatch, capsys):
    make_run(tmp_path / "runs/ppo")
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    exec("\n".join(re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)), names)
    assert names["rewards"] == [step / 6 for step in range(1, 7)]
    assert " w" in capsys.readouterr().out
