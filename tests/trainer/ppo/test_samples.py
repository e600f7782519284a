"""Samples on disk: right to the token, bounded, and the run does not notice."""

import errno
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.batches import make_batch
from helpers.run import make_trainer, read_metrics, roles

from lockstep.protocol import DataProto, Ragged
from lockstep.rewards.outcome import Failure
from lockstep.trainer.ppo import samples
from lockstep.trainer.ppo.rewards import Scored
from lockstep.trainer.ppo.samples import SampleKeeper, choose_samples, share_with_signal, write_samples


class Words:
    """A tokenizer whose tokens are numbers."""

    def batch_decode(self, rows, skip_special_tokens):
        return [self.decode(ids, skip_special_tokens) for ids in rows]

    def decode(self, ids, skip_special_tokens):
        return " ".join(map(str, ids))


LOST = Failure("raised", "no")


def test_the_longest_the_best_and_the_worst_come_first():
    batch = make_batch([(1,), (2, 2), (3, 3, 3), (4,), (5,), (6,)])
    batch.non_tensor_batch["reward_model"] = [{"ground_truth": str(i)} for i in range(6)]
    scored = Scored([None, None, LOST, None, None, None], [0.5, 0.4, 0.0, 1.0, 0.1, 0.5])
    samples = choose_samples(batch, scored, Words(), count=4)
    assert [sample["response"] for sample in samples] == ["3 3 3", "4", "5", "1"]
    assert samples[0] == {"prompt": "1 2", "response": "3 3 3", "score": None, "tokens": 3, "ground_truth": "2"}
    assert [sample["score"] for sample in samples[1:]] == [1.0, 0.1, 0.5]


def test_without_a_score_there_are_still_samples():
    samples = choose_samples(make_batch(), Scored([LOST, LOST], [0.0, 0.0]), Words())
    assert [sample["score"] for sample in samples] == [None, None]


def test_what_has_no_score_is_written_without_one(tmp_path):
    batch = make_batch([(1,), (2, 2)])
    batch.set("token_level_scores", batch.ragged("responses").like(torch.zeros(3)))
    write_samples(str(tmp_path), 3, batch, {"turns": [1, None]}, Words(), [None, LOST])
    lines = [json.loads(line) for line in (tmp_path / "3.jsonl").read_text().splitlines()]
    assert [(line["output"], line["score"], line["turns"]) for line in lines] == [("1", 0, 1), ("2 2", None, None)]


def test_what_a_reward_calls_as_the_file_calls_its_own_is_kept_under_another_name(tmp_path):
    batch = make_batch([(1,), (2, 2)])
    batch.set("token_level_scores", batch.ragged("responses").like(torch.zeros(3)))
    said = {"step": ["a", None], "input": [1, 2], "output": [3, 4], "gts": [5, 6], "score": [0.0, 0.0], "other": [7, 8]}
    write_samples(str(tmp_path), 3, batch, said, Words())
    first = json.loads((tmp_path / "3.jsonl").read_text().splitlines()[0])
    assert (first["step"], first["output"], first["score"]) == (3, "1", 0)
    assert {name: value for name, value in first.items() if name.startswith("said_")} == {
        "said_step": "a", "said_input": 1, "said_output": 3, "said_gts": 5,
    }  # fmt: skip
    assert first["other"] == 7


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a disk that is always full")
def test_a_full_disk_is_said_with_the_file(tmp_path):
    batch = make_batch([(1,), (2, 2)])
    batch.set("token_level_scores", batch.ragged("responses").like(torch.zeros(3)))
    for name in ("3.jsonl", "batch.pt"):
        (tmp_path / name).symlink_to("/dev/full")
    with pytest.raises(OSError, match=r"3\.jsonl") as failed:
        write_samples(str(tmp_path), 3, batch, {}, Words())
    assert failed.value.errno == errno.ENOSPC
    with pytest.raises(OSError, match=r"batch\.pt") as failed:
        batch.save_to_disk(tmp_path / "batch.pt")
    assert failed.value.errno == errno.ENOSPC
    with pytest.raises(FileNotFoundError):  # not a disk that is full
        batch.save_to_disk(tmp_path / "nowhere" / "batch.pt")


def test_a_group_has_a_signal_when_known_scores_differ():
    scored = Scored([None, None, None, LOST, None, None], [0.0, 1.0, 0.0, 5.0, 2.0, 2.0])
    assert share_with_signal(scored, 2) == 1 / 3
    assert share_with_signal(scored, 3) == 1 / 2, "0, 1, 0 differ; 2, 2 do not"


NOT_OF_THE_RUN = ("tim", "perf")


def read(file):
    arrays = dict(np.load(file))
    return json.loads(arrays.pop("rows").tobytes()), arrays


@pytest.fixture
def run(embedded_config, tmp_path):
    """Two steps of PPO; returns the metrics, the last batch with its log-probs after the update, and the run's folder."""

    def train(name, *overrides):
        config = embedded_config(
            "trainer.total_training_steps=2", "trainer.test_freq=2", f"trainer.default_local_dir={tmp_path / name}",
            "actor_rollout_ref.actor.ppo_mini_batch_size=4", *overrides,
        )  # fmt: skip
        trainer = make_trainer(config, {"global_pool": [1]}, roles("ActorRollout", "RefPolicy", "Critic"))
        batches = []
        record = trainer._record
        trainer._record = lambda step, batch, *rest: (batches.append(batch), record(step, batch, *rest))[1]
        try:
            trainer.init_workers()
            trainer.fit()
            after = trainer.actor_wg.compute_log_prob(batches[-1].select(["prompts", "responses"], [])).ragged("old_log_probs")
            return read_metrics(config), batches[-1], after, tmp_path / name
        finally:
            trainer.close()

    return train


def test_tokens_have_the_steps_own_numbers_and_the_run_is_the_same(run):
    metrics, batch, after, folder = run("kept", "trainer.report_rows=5", "trainer.report_ratio=true")
    plain, _, _, without = run("plain", "trainer.report_rows=0")
    for mine, other in zip(metrics, plain, strict=True):
        assert {k: v for k, v in mine.items() if not k.startswith(NOT_OF_THE_RUN)} == {
            k: v for k, v in other.items() if not k.startswith(NOT_OF_THE_RUN)
        }
    assert not (without / "samples").exists()
    assert sorted(file.name for file in (folder / "samples").iterdir()) == ["train_1.npz", "train_2.npz", "val_0.npz", "val_2.npz"]

    texts, arrays = read(folder / "samples/train_2.npz")
    assert len(texts["rows"]) == 6  # five, and the second sample of the third prompt
    lengths = batch.ragged("responses").lengths[:6]
    total = int(lengths.sum())
    assert arrays["lengths"].tolist() == lengths.tolist() == [row["length"] for row in texts["rows"]]
    old, reference = (batch.ragged(name).values[:total] for name in ("old_log_probs", "ref_log_prob"))
    expected = {name: batch.ragged(name).values[:total] for name in ("values", "advantages", "returns", "token_level_rewards")}
    expected |= {"log_probs": old, "kl": old - reference, "log_ratio": after.values[:total] - old}
    for name, values in expected.items():
        assert torch.from_numpy(arrays[name]).float().numpy() == pytest.approx(values.numpy(), rel=1e-3, abs=1e-6), name
    assert np.abs(arrays["log_ratio"]).max() > 1e-3  # the update moved them
    words = [texts["vocabulary"][str(token)] for token in arrays["tokens"]]
    assert "".join(words[: lengths[0]]) == texts["rows"][0]["response"]
    assert texts["sources"]["lockstep/reverse"]["rows"] == 16
    assert len(read(folder / "samples/val_2.npz")[0]["rows"]) == 5


class Letters:
    def batch_decode(self, rows):
        return ["".join(chr(97 + token % 26) for token in row) for row in rows]


def batch_of(lengths):
    tokens = Ragged(torch.arange(sum(lengths)), torch.tensor(lengths))
    columns = {"prompts": tokens, "responses": tokens, "response_mask": tokens.like(torch.ones(sum(lengths), dtype=torch.int64))}
    columns["advantages"] = tokens.like(torch.full((sum(lengths),), 1e9))
    batch = DataProto.from_dict(columns, {"uid": [str(i) for i in range(len(lengths))]})
    failures = [None] * (len(lengths) - 1) + [Failure("timeout", "after 3 s")]
    return batch, Scored(failures, [1.0] * len(lengths))


def test_numbers_by_token_are_bounded_and_missing_rewards_are_none(tmp_path, monkeypatch):
    monkeypatch.setattr(samples, "MAX_TOKENS", 10)
    SampleKeeper(tmp_path, -1, Letters()).keep("train_1", *batch_of([4, 6, 1]))
    texts, arrays = read(tmp_path / "samples/train_1.npz")
    assert arrays["lengths"].tolist() == [4, 6]
    assert len(texts["rows"]) == 3
    assert texts["rows"][2]["reward"] is None
    assert texts["rows"][2]["failure"] == "timeout: after 3 s"
    assert np.isfinite(arrays["advantages"]).all()  # beyond what float16 holds
    assert texts["sources"] == {"unknown": {"rows": 2, "prompts": 2, "is_binary": True}}


def test_the_environments_tokens_have_no_probability_but_a_row_that_was_left_out_keeps_its_own(tmp_path):
    batch, scored = batch_of([3, 2])
    mask = batch.ragged("response_mask")
    batch.set("response_mask", mask.like(torch.tensor([1, 0, 1, 0, 0])))
    batch.set("rollout_log_probs", mask.like(torch.full((5,), -0.5)))
    SampleKeeper(tmp_path, -1, Letters()).keep("train_1", batch, scored)
    _, arrays = read(tmp_path / "samples/train_1.npz")
    assert np.isnan(arrays["log_probs"]).tolist() == [False, True, False, False, False]
    assert arrays["mask"].tolist() == [1, 0, 1, 0, 0]


def test_a_disk_that_cannot_take_them_is_a_warning(tmp_path):
    (tmp_path / "samples").write_text("in the way")
    with pytest.warns(UserWarning, match="train_1 are not kept for lockstep report"):
        SampleKeeper(tmp_path, -1, Letters()).keep("train_1", *batch_of([2]))
