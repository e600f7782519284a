"""A killed run goes on as if nothing had happened: same weights, moments and metrics, to the bit (helpers/kills.py is the harness)."""

import json

import pytest
from helpers.kills import CASES, kill_runs, program_runs, small_runs
from helpers.tiny import save_tiny_model

from lockstep.tools.verify_resume import end_of
from lockstep.trainer import recipes

STAGES = {
    "sft": (recipes.SFT.main, {"data.train_files": "examples.jsonl"}),
    "distill": (
        recipes.DISTILL.main,
        {"data.train_files": "examples.jsonl", "teacher.path": "teacher", "distill.max_response_length": 8},
    ),
    "dpo": (recipes.DPO.main, {"data.train_files": "pairs.jsonl", "reference.mode": "file"}),
    "reward-model": (recipes.REWARD_MODEL.main, {"data.train_files": "pairs.jsonl"}),
}


@pytest.mark.parametrize("case", ["PPO, fsdp2", "GRPO, fsdp2"])
def test_a_run_that_is_killed_again_and_again_ends_as_one_that_is_not(embedded_task, tmp_path, case):
    found = kill_runs(small_runs(embedded_task, *CASES[case]), tmp_path, num_kills=16, seed=0)
    assert found.kills >= 16
    assert found.different == []


@pytest.mark.parametrize("command", STAGES)
def test_a_stage_that_is_killed_again_and_again_ends_as_one_that_is_not(tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)  # the files are named from here
    for seed, name in enumerate(("model", "teacher")):
        save_tiny_model(tmp_path / name, seed=seed)
    words = ["abc", "bcdef", "hi", "ghiab", "cdefgh", "ja", "fed", "hgij", "ace", "bdfh", "dig", "jab"]
    rows = [{"prompt": word, "completion": word[::-1], "chosen": word[::-1], "rejected": word} for word in words]
    for name, columns in (("examples", ("prompt", "completion")), ("pairs", ("prompt", "chosen", "rejected"))):
        lines = (json.dumps({column: row[column] for column in columns}) + "\n" for row in rows)
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
    main, keys = STAGES[command]
    common = {
        "model.path": "model", "data.max_length": 32, "data.train_batch_size": 6, "optim.lr": 1e-3, "trainer.device": "cpu",
        "trainer.total_training_steps": 5, "trainer.save_freq": 2, "trainer.max_ckpt_to_keep": 2,
    }  # fmt: skip
    start = program_runs(main, common | keys)
    start(tmp_path / "imports")  # a fork has what this process has imported
    found = kill_runs(start, tmp_path, num_kills=5, seed=0)
    assert found.kills >= 5
    assert found.different == []


@pytest.mark.parametrize("warmup", [0, 3])
def test_how_often_and_how_a_run_saves_changes_no_bit_of_its_end(embedded_task, tmp_path, warmup):
    def end(*keys):
        run_dir = tmp_path / "_".join(keys).replace("=", "_")
        keys = ("trainer.total_training_steps=4", f"trainer.critic_warmup={warmup}", *keys)
        small_runs(embedded_task, *CASES["PPO, fsdp2"], *keys)(run_dir)
        return {name: found for name, found in end_of(run_dir).items() if name != "checkpoints"}

    expected = end("trainer.save_freq=-1")
    assert end("trainer.save_freq=1") == expected
    assert end("trainer.save_freq=3", "trainer.save_in_background=false") == expected
