"""What a step keeps for `lockstep report`: right to the token, bounded, and the run does not notice."""

import json

import numpy as np
import pytest
import torch
from helpers.run import make_trainer, read_metrics, roles

from lockstep.protocol import DataProto, Ragged
from lockstep.rewards.outcome import Failure
from lockstep.trainer.ppo import kept_samples
from lockstep.trainer.ppo.kept_samples import SampleKeeper
from lockstep.trainer.ppo.scored import Scored

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
        trainer._record = lambda step, batch, scored: (batches.append(batch), record(step, batch, scored))[1]
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
    monkeypatch.setattr(kept_samples, "MAX_TOKENS", 10)
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
