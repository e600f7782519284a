import errno
import json
from pathlib import Path

import pytest
import torch
from helpers.batches import make_batch

from lockstep.rewards.outcome import Failure
from lockstep.trainer.ppo.samples import choose_samples, share_with_signal, write_samples
from lockstep.trainer.ppo.scored import Scored


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
