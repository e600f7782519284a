"""The first thing a user sees: `lockstep ppo`, here in fewer steps than its own."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

STEPS = 40
LOCKSTEP = str(Path(sys.executable).with_name("lockstep"))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_demo_learns_and_says_what_it_did(tmp_path):
    run = subprocess.run(
        [LOCKSTEP, "ppo", f"trainer.total_training_steps={STEPS}"], cwd=tmp_path, capture_output=True, text=True, timeout=560
    )
    assert run.returncode == 0, run.stderr
    lines = run.stdout.splitlines()
    last = run.stdout[run.stdout.index(f"\ndone: {STEPS} steps in ") :]
    before, after = map(float, re.search(r"mean@1: ([\d.]+)(?: \[.*?\])? before, ([\d.]+)(?: \[.*?\])? after", last).groups())
    assert before < 0.6
    assert after >= 0.9
    checkpoint = tmp_path / re.search(r"checkpoint \(a Hugging Face folder\): (\S+)", last).group(1)
    assert (tmp_path / re.search(r"metrics of every step: (\S+)", last).group(1)).is_file()
    assert "what to try next" in last
    # Piped output is plain lines, one a step, with nothing written over them.
    steps = [
        line
        for line in lines
        if re.match(rf"step \d+/{STEPS}  reward [\d.]+  (\w+( kl)? -?[\d.]+  )*length [\d.]+  [\d.]+ s  (ETA \S+  )?\(gen ", line)
    ]
    assert len(steps) == STEPS
    assert "alarm" not in run.stdout
    assert "\x1b" not in run.stdout
    assert "%|" not in run.stderr
    # The checkpoint is a model like any other.
    tokenizer, model = AutoTokenizer.from_pretrained(checkpoint), AutoModelForCausalLM.from_pretrained(checkpoint)
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "abcd"}], add_generation_prompt=True, return_tensors="pt")
    out = model.generate(**prompt, do_sample=False, max_new_tokens=8)
    assert tokenizer.decode(out[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True) == "dcba"
    shutil.rmtree(tmp_path / "checkpoints")
