"""The command, from nothing to the picture."""

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from lockstep.tools.compare.command import main


@pytest.fixture(scope="module")
def recorded(embedded_task, tmp_path_factory) -> Path:
    """One step of the embedded task, recorded by the command."""
    folder = tmp_path_factory.mktemp("compare")
    status = main(
        [
            "--record", str(folder / "rec"), f"data.train_files={embedded_task.train_file}",
            f"actor_rollout_ref.model.path={embedded_task.model}", "actor_rollout_ref.model.enable_gradient_checkpointing=false",
            "critic.model.enable_gradient_checkpointing=false", "data.train_batch_size=8", "data.max_prompt_length=16",
            "data.max_response_length=12", "actor_rollout_ref.rollout.n=4", "algorithm.use_kl_in_reward=true", "trainer.device=cpu",
            f"trainer.default_local_dir={folder / 'run'}",
        ]
    )  # fmt: skip
    assert status == 0
    return folder


def test_from_the_embedded_task_to_tables_numbers_and_a_picture(recorded, tmp_path, capsys):
    own = tmp_path / "own.py"
    own.write_text("def mine(*, log_prob, advantages, response_mask):\n    return -advantages * log_prob * response_mask, {}\n")
    names = ["ppo", "grpo", "remax", "gspo+rloo", "gdpo", f"{own}:mine+grpo"]
    status = main([str(recorded / "rec"), "--algorithms", *names, "--out", str(tmp_path / "out"), "--drift", "1e-3"])
    printed = capsys.readouterr().out
    assert status == 0
    assert "not comparable: gdpo" in printed
    data = json.loads((tmp_path / "out" / "compare.json").read_text())
    assert [result["name"] for result in data["results"]] == ["ppo", "grpo", "remax", "gspo+rloo", "mine+grpo"]
    assert all(result["grad_norm"] > 0 for result in data["results"])
    assert data["results"][-1]["clip_fraction"] is None  # the loss of the file reports none
    for i, row in enumerate(data["cosines"]):
        assert row[i] == pytest.approx(1, abs=1e-9)
        assert all(-1 <= value <= 1 + 1e-9 for value in row)
    assert data["source"]["largest_log_ratio"] > 1e-3  # the drift
    ElementTree.fromstring((tmp_path / "out" / "compare.svg").read_text())


def test_before_any_update_the_ratios_are_1_and_the_losses_agree(recorded, tmp_path, capsys):
    arguments = [str(recorded / "rec" / "step_1"), "--algorithms", "vanilla+grpo", "cispo+grpo", "--out", str(tmp_path)]
    assert main([*arguments, "actor_rollout_ref.actor.loss_agg_mode=token-mean"]) == 0
    data = json.loads((tmp_path / "compare.json").read_text())
    assert data["source"]["largest_log_ratio"] < 1e-4
    assert data["cosines"][0][1] == pytest.approx(1, abs=1e-5)
    assert [result["clip_fraction"] for result in data["results"]] == [0, 0]


def test_the_checkpoint_after_the_recorded_step_has_moved(recorded, tmp_path):
    later = recorded / "run" / "global_step_1" / "actor"
    assert main([str(recorded / "rec"), "--algorithms", "grpo", "rloo", "--model", str(later), "--out", str(tmp_path)]) == 0
    assert json.loads((tmp_path / "compare.json").read_text())["source"]["largest_log_ratio"] > 1e-3


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["{rec}", "--algorithms", "grpo", "rlooo"], "did you mean 'rloo'"),
        (["{rec}", "--algorithms", "grpo"], "needs two"),
        (["{rec}", "actor_rollout_ref.actor.clip_ratoi=0.1"], "actor_rollout_ref.actor.clip_ratio"),
        (["{rec}", "--algorithms", "grpo", "rloo", "--model", "/nowhere"], "/nowhere does not exist"),
        (["{rec}", "--drift", "-1"], "learning rate"),
        (["{rec}", "--tokens", "many"], "not a count"),
        (["/nowhere"], "--record"),
        ([], "name a recorded batch"),
        (["--colour"], "--colour"),
        (["--record", "x", "algorithm.adv_estimatr=grpo"], "algorithm.adv_estimator"),
    ],
)
def test_bad_input_is_one_line_that_says_what_to_do(recorded, capsys, arguments, says):
    assert main([text.format(rec=recorded / "rec") for text in arguments]) == 1
    printed = capsys.readouterr().err.removeprefix("comparing ...\n")
    assert printed.startswith("error: ")
    assert says in printed
