"""`lockstep dpo` from the command line: a run that is killed goes on to the same bits."""

import subprocess
import sys
import time

import torch
from helpers.preferences import dpo_config, make_preferences, train
from safetensors.torch import load_file

from lockstep.checkpoint import folders
from lockstep.config.load import to_yaml


def test_a_killed_run_goes_on_to_the_same_bits(tmp_path):
    make_preferences(tmp_path)
    keys = ["trainer.total_training_steps=16", "trainer.save_freq=4", "reference.mode=file"]
    whole, killed = (dpo_config(tmp_path, *keys, f"trainer.default_local_dir={tmp_path / name}") for name in ("whole", "killed"))
    expected = train(whole)
    config = tmp_path / "killed.yaml"
    config.write_text(to_yaml(killed))
    run = subprocess.Popen([sys.executable, "-m", "lockstep.cli", "dpo", "--config", str(config)], stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while run.poll() is None and folders.newest(tmp_path / "killed") is None and time.monotonic() < deadline:
        time.sleep(0.01)
    run.kill()
    run.wait()
    at = folders.newest(tmp_path / "killed")
    assert at is not None
    assert at.name != "global_step_16"  # it did not come to its end
    resumed = train(killed)
    assert resumed[-1]["train/loss"] == expected[-1]["train/loss"]
    weights = [load_file(tmp_path / name / "global_step_16/actor/model.safetensors") for name in ("whole", "killed")]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
