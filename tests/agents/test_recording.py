"""What environments said is kept, and a step is done again from it without them."""

from __future__ import annotations

import errno
import gzip
import io
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers import environments

from lockstep.agents import Action
from lockstep.agents.recording import Recorder, recorded_class
from lockstep.errors import DataError
from lockstep.protocol import DataProto
from lockstep.tools.replay import capsule as capsule_command
from lockstep.tools.replay import command as replay
from lockstep.trainer import main_ppo


def run(chat_model, folder, *more, kwargs):
    pq.write_table(
        pa.Table.from_pylist([{"prompt": f"row {i}", "env_kwargs": kwargs(i)} for i in range(8)]), folder / "train.parquet"
    )
    keys = [
        f"data.train_files={folder / 'train.parquet'}", "data.train_batch_size=4", "data.max_prompt_length=64",
        "data.max_response_length=150", f"actor_rollout_ref.model.path={chat_model}", "actor_rollout_ref.rollout.n=2",
        "actor_rollout_ref.actor.optim.lr=1e-3", "agent.max_turn_tokens=10", f"trainer.default_local_dir={folder / 'run'}",
        "trainer.device=cpu", "trainer.total_training_steps=2", "trainer.save_freq=1", "algorithm.adv_estimator=grpo",
    ]  # fmt: skip
    assert main_ppo.main([*keys, *more]) == 0


def forget(monkeypatch, kind):
    def gone(*_):
        raise AssertionError("an environment was asked")

    monkeypatch.setattr(kind, "__init__", gone)
    monkeypatch.setattr(kind, "is_quick", True)  # in this process, where it would be heard of


def test_a_step_is_done_again_without_its_environments_failures_and_all(chat_model, tmp_path, monkeypatch, capsys):
    markers = tmp_path / "markers"
    markers.mkdir()

    def kwargs(i):
        return {"how": "raise", "marker": str(markers / str(i))}

    more = ("agent.environment=helpers.environments:Breaks", "agent.max_observation_tokens=4", "agent.history=template")
    run(chat_model, tmp_path, *more, kwargs=kwargs)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert sum(row.get("agent/retries", 0) for row in rows) > 0
    assert capsule_command.main([str(tmp_path / "run"), "--step", "2"]) == 0
    forget(monkeypatch, environments.Breaks)
    assert replay.main([str(tmp_path / "run" / "capsule_step_2.json"), "trainer.device=cpu"]) == 0
    assert "step 2: as it was" in capsys.readouterr().out


def test_greedy_baselines_and_missing_episodes_are_replayed_too(chat_model, tmp_path, monkeypatch, capsys):
    def kwargs(i):
        return {"how": "wrong" if i == 3 else "none"}

    keys = ("agent.environment=helpers.environments:Breaks", "algorithm.adv_estimator=remax", "reward.max_failure_rate=0.5")
    run(chat_model, tmp_path, *keys, "trainer.save_freq=2", "trainer.total_training_steps=2", kwargs=kwargs)
    file = tmp_path / "run" / "episodes" / "1.jsonl.gz"
    lines = [json.loads(line) for line in gzip.decompress(file.read_bytes()).decode().splitlines()]
    assert len(lines) == 4 * 2 + 4
    assert capsule_command.main([str(tmp_path / "run"), "--step", "2"]) == 0
    forget(monkeypatch, environments.Breaks)
    assert replay.main([str(tmp_path / "run" / "capsule_step_2.json"), "trainer.device=cpu"]) == 0
    assert "step 1: as it was\nstep 2: as it was" in capsys.readouterr().out.replace("\r", "")


def test_a_run_that_goes_on_keeps_what_earlier_steps_need(tmp_path):
    def batch(number):
        return DataProto({}, {"episode": [{"seed": number}]}), DataProto({}, {"index": [0], "sample": [0]})

    def kind(said):
        return {"tools": [], "is_judged": said}

    Recorder(tmp_path).write(1, *batch(1), {"": kind(False), "game.py:Game": kind(True)})
    Recorder(tmp_path).write(2, *batch(2), {"": kind(True)})  # and no row of the other
    kinds = json.loads((tmp_path / "episodes" / "kinds.json").read_text())
    assert kinds == {"": kind(True), "game.py:Game": kind(True)}


def test_a_full_disk_is_an_error_that_names_the_file(tmp_path, monkeypatch):
    class Full(io.RawIOBase):
        def writable(self):
            return True

        def write(self, data):
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(gzip, "open", lambda *_, **__: io.TextIOWrapper(Full(), write_through=True))
    prompts, episodes = DataProto({}, {"index": [0], "sample": [0]}), DataProto({}, {"episode": [{"seed": 1}]})
    with pytest.raises(OSError) as caught:
        Recorder(tmp_path).write(3, episodes, prompts, {})
    assert caught.value.filename == str(tmp_path / "episodes" / "3.jsonl.gz")


def test_what_was_not_recorded_is_an_error(tmp_path):
    told = {
        "index": 4, "sample": 0, "seed": 9, "retries": 0, "error": None,
        "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
        "heard": [{"messages": 1, "reward": None, "done": False, "info": {}}],
    }  # fmt: skip
    file = tmp_path / "episodes.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in ({"": {"tools": [], "is_judged": True}}, told)))
    kind = recorded_class(str(file), None)
    assert kind.is_judged
    environment = kind(anything=1)
    assert environment.reset({"index": 4, "sample": 0}, 9).messages == [{"role": "user", "content": "a"}]
    with pytest.raises(DataError, match="more turns than were recorded"):
        environment.step(Action("b", "b"))
    with pytest.raises(DataError, match="no episode was recorded for the prompt 4, sample 1"):
        kind().reset({"index": 4, "sample": 1}, 9)
    with pytest.raises(DataError, match="no episodes of the environment 'x.py:X'"):
        recorded_class(str(file), "x.py:X")
    with pytest.raises(DataError, match="cannot be read"):
        recorded_class(str(tmp_path / "none"), None)
