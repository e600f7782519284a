"""What was generated and scored in a step is not done twice, and what is not of this very step is never used."""

from __future__ import annotations

import dataclasses
import gzip
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from helpers.run import make_trainer, roles

from lockstep.agents.agent import Agent
from lockstep.agents.recording import Recorder
from lockstep.agents.training import EpisodeRollout
from lockstep.config import load_config
from lockstep.config.sampling import SamplingParams
from lockstep.errors import WorkerDied
from lockstep.observability.metrics import Max, Mean
from lockstep.protocol import DataProto, Ragged
from lockstep.rewards.outcome import Failure
from lockstep.tools.verify_resume import differences
from lockstep.trainer.ppo import stages
from lockstep.trainer.ppo.interfaces import RolloutWorkers
from lockstep.trainer.ppo.journal import Journal, JournaledRollout, JournaledScorer
from lockstep.trainer.ppo.rewards import Scored

SAMPLING = SamplingParams(temperature=1.0, max_tokens=4, stop_token_ids=(1,), seed=0)


class Rollout:
    """Counts how often it is asked."""

    def __init__(self) -> None:
        self.calls = 0

    def generate_sequences(self, prompts: DataProto, sampling: Any, step: int, on_finished: Any = None) -> DataProto:
        self.calls += 1
        responses = Ragged.from_rows([[step, self.calls], [7], []], dtype=torch.int64)
        mask = responses.like(torch.ones(3, dtype=torch.int64))
        columns = {
            "responses": responses,
            "response_mask": mask,
            "rollout_log_probs": responses.like(torch.tensor([-0.1, -0.2, -1e-9])),
        }
        return DataProto(columns, {"finish_reason": ["stop", "length", "stop"]}, {"seen": 3})


class Scores:
    """Counts how often it is asked."""

    extra: Any = ("a", None, {"b": [1, float("inf")]})

    tokenizer = SimpleNamespace(decode=lambda tokens, skip_special_tokens: str(tokens))

    def __init__(self, run_dir: Path) -> None:
        self.calls, self.run_dir = 0, run_dir

    def score(self, batch: DataProto, number: int, scoring: Any = None) -> tuple[Scored, dict[str, Any]]:
        self.calls += 1
        batch.set("token_level_scores", batch.ragged("responses").like(torch.tensor([0.0, 0.1, 0.3])))
        batch.set("response_mask", batch.ragged("response_mask").like(torch.tensor([1, 1, 0])))
        batch.set("reward_parts", torch.tensor([[0.5], [1.0], [0.0]]))
        batch.meta_info["reward_part_names"] = ["x"]
        scored = Scored(
            [None, Failure("timeout", "late", 2.0), None], [0.1, 0.0, 0.3], {"note": list(self.extra)}, {"x": [0.5, None, 1.0]}
        )
        return scored, {"reward/x/mean": Mean(1.5, 2), "reward/x/max": Max(1.0)}


class Step:
    """One step's generation and scoring, with a journal in `folder`."""

    def __init__(self, folder: Path, *overrides: str, weights: Any = ("w",)) -> None:
        self.rollout, self.scores, self.said = Rollout(), Scores(folder), list[str]()
        self.config = load_config([f"trainer.default_local_dir={folder}", "trainer.max_restarts=1", *overrides])
        self.journal = Journal(self.config, lambda: weights, self.said.append)
        self.generator = JournaledRollout(RolloutWorkers(self.rollout), self.journal)
        self.scorer = JournaledScorer(self.scores, self.journal, folder, self.scores.tokenizer)

    def __call__(self, number: int = 1, sampling: SamplingParams = SAMPLING) -> tuple[DataProto, Any]:
        prompts = Ragged.from_rows([[2, 3], [4], [5]], dtype=torch.int64)
        batch = DataProto({"prompts": prompts}, {"index": [0, 0, 1], "extra_info": [{"x": np.arange(2)}] * 3})
        found = self.generator.generate_sequences(batch.select(["prompts"], ["index"]), sampling=sampling, step=number)
        batch.union(found)
        return batch, self.scorer.score(batch, number)

    @property
    def calls(self) -> tuple[int, int]:
        return self.rollout.calls, self.scores.calls


@pytest.fixture
def first(tmp_path: Path) -> tuple[DataProto, Any]:
    """What a step that was then lost came to."""
    step = Step(tmp_path)
    result = step()
    assert step.calls == (1, 1)
    assert step.said == []
    return result


def test_what_was_done_is_not_done_again_and_is_the_same(tmp_path: Path, first: Any) -> None:
    step = Step(tmp_path)
    batch, (scored, metrics) = step()
    assert step.calls == (0, 0)
    assert step.said == []
    expected, (scored_before, metrics_before) = first
    assert batch.columns.keys() == expected.columns.keys()
    for name, column in expected.columns.items():
        found = batch.columns[name]
        assert found.equal(column) if isinstance(column, Ragged) else torch.equal(found, column)  # type: ignore[arg-type,union-attr]
        assert type(found) is type(column)
    assert batch.non_tensor_batch["finish_reason"].tolist() == ["stop", "length", "stop"]
    assert batch.meta_info == expected.meta_info
    assert scored == scored_before
    assert metrics == metrics_before


def test_failures_that_come_from_the_journal_are_recorded_again(tmp_path: Path, first: Any) -> None:
    """A resumed run has dropped the lines of the step that it does again."""
    Step(tmp_path)()
    (line,) = map(json.loads, (tmp_path / "reward_failures.jsonl").read_text().splitlines())
    assert (line["batch"], line["kind"], line["response"]) == (1, "timeout", "[7]")


def test_a_response_that_was_not_scored_is_scored(tmp_path: Path, first: Any) -> None:
    (file,) = (tmp_path / "journal").glob("*/scored.*")
    file.unlink()
    step = Step(tmp_path)
    step()
    assert step.calls == (0, 1)


@pytest.mark.parametrize(
    "other",
    [
        lambda folder: Step(folder, weights=("other",)),
        lambda folder: Step(folder, "trainer.seed=5"),
        lambda folder: Step(folder, "algorithm.gamma=0.5"),
    ],
    ids=["weights", "seed", "settings"],
)
def test_a_journal_of_other_weights_or_settings_is_not_used_and_said(tmp_path: Path, first: Any, other: Any) -> None:
    step = other(tmp_path)
    step()
    assert step.calls == (1, 1)
    (message,) = step.said
    assert "is of other weights or settings; it is not used" in message
    assert len(list((tmp_path / "journal").iterdir())) == 1


def test_other_sampling_or_another_batch_is_generated(tmp_path: Path, first: Any) -> None:
    step = Step(tmp_path)
    step(sampling=dataclasses.replace(SAMPLING, temperature=0.0))
    step(number=2)
    assert step.rollout.calls == 2
    step()
    assert step.rollout.calls == 2
    assert step.said == []


@pytest.mark.parametrize("key", ["reward.custom_reward_function.path={}", "agent.environment={}:A", "agent.tools=[{}:f]"])
def test_changed_code_is_asked(tmp_path: Path, key: str) -> None:
    code = tmp_path / "code.py"
    code.write_text("old")
    key = key.format(code)
    Step(tmp_path, key)()
    code.write_text("new")
    step = Step(tmp_path, key)
    step()
    assert step.calls == (1, 1)


class Group:
    """Plays episodes that say how they were sampled; counts how often it is asked."""

    def __init__(self) -> None:
        self.rollout = Rollout()

    def run_episodes(
        self, prompts: DataProto, agent: Any, sampling: SamplingParams, step: int, on_finished: Any = None
    ) -> DataProto:
        found = self.rollout.generate_sequences(prompts, sampling, step)
        found.non_tensor_batch["episode"] = [{"seed": 0, "temperature": sampling.temperature}] * len(prompts)
        return found


class Episodes:
    """A run of episodes that begins, or begins again, in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.group, agent = Group(), SimpleNamespace(kind=lambda name: {"tools": [], "is_judged": True})
        rollout = EpisodeRollout(self.group, cast(Agent, agent), Recorder(folder), last_step=2)
        config = load_config([f"trainer.default_local_dir={folder}", "trainer.max_restarts=1"])
        self.generator = JournaledRollout(rollout, Journal(config, lambda: "w", print))

    def __call__(self, temperature: float, environment: str | None = None) -> int:
        prompts = Ragged.from_rows([[2, 3], [4], [5]], dtype=torch.int64)
        objects = {"index": [0, 0, 1], "sample": [0, 1, 0], "environment": [environment] * 3}
        sampling = dataclasses.replace(SAMPLING, temperature=temperature)
        self.generator.generate_sequences(DataProto({"prompts": prompts}, objects), sampling=sampling, step=1)
        return self.group.rollout.calls


def test_episodes_that_come_from_the_journal_are_recorded_beside_those_that_are_played(tmp_path: Path) -> None:
    """A worker was lost before the greedy baseline was there."""
    assert Episodes(tmp_path)(1.0) == 1
    again = Episodes(tmp_path)
    assert [again(1.0), again(0.0)] == [0, 1]
    lines = gzip.decompress((tmp_path / "episodes" / "1.jsonl.gz").read_bytes()).decode().splitlines()
    assert [json.loads(line)["temperature"] for line in lines] == [1.0] * 3 + [0.0] * 3


def test_changed_code_of_an_environment_that_rows_name_is_asked(tmp_path: Path) -> None:
    code = tmp_path / "game.py"
    code.write_text("old")
    assert Episodes(tmp_path)(1.0, f"{code}:Game") == 1
    assert Episodes(tmp_path)(1.0, f"{code}:Game") == 0
    code.write_text("new")
    assert Episodes(tmp_path)(1.0, f"{code}:Game") == 1


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


DAMAGE = {
    "a flipped bit": flip,
    "cut short": lambda file: file.write_bytes(file.read_bytes()[:-7]),
    "empty": lambda file: file.write_bytes(b""),
    "no checksum": lambda file: file.write_bytes(file.read_bytes()[64:]),
    "a pickle": lambda file: file.write_bytes(b"\x80\x04cos\nsystem\n"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_journal_is_said_and_done_again(tmp_path: Path, first: Any, damage: str) -> None:
    (file,) = (tmp_path / "journal").glob("*/generated.*")
    DAMAGE[damage](file)
    step = Step(tmp_path)
    step()
    assert step.calls[0] == 1
    assert "generated" in step.said[0]
    assert "is damaged" in step.said[0]


def test_a_file_under_the_name_of_another_is_not_used(tmp_path: Path, first: Any) -> None:
    Step(tmp_path)(number=2)
    (one,), (two,) = (list((tmp_path / "journal").glob(f"batch_{number}.*/generated.*")) for number in (1, 2))
    one.write_bytes(two.read_bytes())
    step = Step(tmp_path)
    step()
    assert step.calls[0] == 1
    assert "it has the name of another one" in step.said[0]


def test_a_finished_step_leaves_no_journal_but_that_of_later_ones(tmp_path: Path, first: Any) -> None:
    step = Step(tmp_path)
    step(number=2)
    step(number=10)
    step.journal.clear(2)
    assert [folder.name.split(".")[0] for folder in (tmp_path / "journal").iterdir()] == ["batch_10"]


def test_what_json_does_not_give_back_is_not_journaled_and_said_once(tmp_path: Path) -> None:
    step = Step(tmp_path)
    step.scores.extra = (("a", "tuple"), None, None)
    step()
    step(number=2)
    (message,) = step.said
    assert "is not journaled" in message
    again = Step(tmp_path)
    again()
    assert again.calls == (0, 1)


def test_a_journal_that_cannot_be_written_does_not_end_the_run(tmp_path: Path) -> None:
    (tmp_path / "journal").write_text("a file where a folder should be")
    step = Step(tmp_path)
    step()
    assert step.calls == (1, 1)
    assert len(step.said) == 1


def test_a_run_that_loses_a_worker_generates_once_and_ends_as_one_that_does_not(embedded_config_in, tmp_path, monkeypatch):
    """Lost in the update of the fourth step. The newest checkpoint is that of the second, so the third is done again, with its journal
    gone, and leads to the same weights. Each batch has a greedy baseline too (remax)."""
    update, write, written = stages.update_actor, Journal.write, list[tuple[int, str]]()

    def note(journal, number, what, *more):
        written.append((number, what))
        write(journal, number, what, *more)

    monkeypatch.setattr(Journal, "write", note)

    def run(name, lost_at):
        written.clear()
        keys = ("total_training_steps=4", "save_freq=2", "max_restarts=1", "val_before_train=false")
        config = embedded_config_in(tmp_path / name, *(f"trainer.{key}" for key in keys), "algorithm.adv_estimator=remax")
        trainer = make_trainer(config, {"global_pool": [1]}, roles("ActorRollout", "RefPolicy"))

        def lose(*arguments):
            if trainer.global_steps + 1 == lost_at and not trainer.num_restarts:
                raise WorkerDied("actor rank 0", "it is gone")
            return update(*arguments)

        monkeypatch.setattr(stages, "update_actor", lose)
        try:
            trainer.init_workers()
            trainer.fit()
        finally:
            trainer.close()
        return trainer, config.trainer.run_dir, list(written)

    batch = ("generated", "scored", "generated", "scored")
    _, whole, done = run("whole", None)
    assert done == [(number, what) for number in (1, 2, 3, 4) for what in batch]
    trainer, hit, done = run("hit", 4)
    assert trainer.num_restarts == 1
    assert done == [(number, what) for number in (1, 2, 3, 4, 3) for what in batch]
    assert list(differences(whole, hit)) == []
    assert not list((hit / "journal").iterdir())
