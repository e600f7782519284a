"""One step of GRPO on a tiny model, from generation to the update.

`python -m lockstep.tools.doctor.selftest` prints a JSON line for each finding.
"""

import contextlib
import io
import json
import math
import tempfile
import time
from pathlib import Path
from typing import Any

DIFFERENCE = {"cpu": 1e-3, "cuda": 0.5}
"""Largest difference of a log-prob between sampler and trainer that is not a fault: float32, and bfloat16 on a GPU."""


def main() -> None:
    """Say what devices there are, then what generation and training did."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        _say("device", True, f"GPU {index}: {properties.name}, {properties.total_memory / 2**30:.1f} GiB")
    if device == "cpu":
        _say("device", True, "no GPU that torch sees: runs use the CPU")
    started = time.perf_counter()
    try:
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
            metrics = _step(Path(folder))
    except Exception as error:
        _say("generation and training", False, f"{type(error).__name__}: {error}")
        return
    seconds = time.perf_counter() - started
    difference = metrics["training/rollout_log_probs_diff_max"]
    norm = metrics["actor/grad_norm"]
    said = f"{metrics['response_length/mean']:.1f} tokens in the mean; sampler and trainer differ by at most {difference:.1e} in a log-prob"
    _say("generation", difference < DIFFERENCE[device], said)
    _say(
        "training",
        math.isfinite(norm) and norm > 0,
        f"two updates, gradient norm {norm:.3g}; {seconds:.1f} s with generation and start",
    )


def _step(folder: Path) -> dict[str, float]:
    """The metrics of one step on the embedded task, with new weights."""
    import torch
    from transformers import LlamaForCausalLM

    from lockstep.config import load_config
    from lockstep.embedded.task import make_tokenizer, make_words, model_config, write_prompts
    from lockstep.trainer.main_ppo import run

    torch.manual_seed(0)
    tokenizer = make_tokenizer()
    LlamaForCausalLM(model_config(tokenizer)).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    keys = {
        "data.train_files": write_prompts(folder, "train", make_words(0)[:8]), "data.train_batch_size": 8,
        # Nothing that new weights write is right: the entropy is what moves them.
        "actor_rollout_ref.model.path": folder / "model", "actor_rollout_ref.actor.entropy_coeff": 0.01,
        "data.max_prompt_length": 8, "data.max_response_length": 8, "actor_rollout_ref.rollout.n": 4,
        "actor_rollout_ref.actor.ppo_mini_batch_size": 4, "algorithm.adv_estimator": "grpo", "actor_rollout_ref.actor.optim.lr": 1e-4,
        "trainer.total_training_steps": 1, "trainer.save_freq": 0, "trainer.default_local_dir": folder / "run",
    }  # fmt: skip
    run(load_config([f"{key}={value}" for key, value in keys.items()]))
    line = (folder / "run" / "metrics.jsonl").read_text().splitlines()[-1]
    found: dict[str, float] = json.loads(line)
    return found


def _say(name: str, is_well: bool, text: str) -> None:
    message: dict[str, Any] = {"name": name, "is_well": is_well, "text": text}
    print(json.dumps(message), flush=True)


if __name__ == "__main__":
    main()
