"""Does it learn? SmolLM2 is fine-tuned on GSM8K's solutions, then trained with rewards: reward over time, and validation with intervals.

    python -m benchmarks.learn --source DIR --algorithms grpo gae rloo dapo --seeds 0 1 2
    python -m benchmarks.learn --source DIR --tiny --device cpu --steps 2

DIR has GSM8K's train.jsonl and test.jsonl. The programs are started as a user starts them: `lockstep preprocess`, `lockstep sft`, then
`lockstep grpo` (`ppo` for gae, `rloo`, `dapo`) from the fine-tuned model, for each seed. A run whose folder is complete is not made again.
Validation is one sample at temperature 1 for each test question, with Wilson's 95 % interval; over several seeds, the t interval of their
means. --tiny is a random model with SmolLM2's tokenizer, for a look at the script itself
(dapo ends with an error then: no group of its responses differs). One table, and benchmarks/results/learn_*.json,
written after each run.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch

from benchmarks.step import RESULTS, _about
from lockstep.observability.statistics import t_interval, wilson_interval

COMMANDS = {"grpo": "grpo", "gae": "ppo", "rloo": "rloo", "dapo": "dapo"}
"""Algorithm -> the command that is its preset."""
REWARD = "critic/score/mean"
SHOWN = 10
"""Steps whose mean reward is shown, at the beginning and at the end."""


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(arguments)
    started = time.perf_counter()
    data = _data(options)
    model, tuned = _fine_tuned(options, data)
    print(f"fine-tuned: {tuned}", flush=True)
    questions, runs = pq.read_metadata(data / "test.parquet").num_rows, []
    questions = min(questions, options.val_samples) if options.val_samples > 0 else questions
    file = options.results / f"learn_{options.name or ('tiny' if options.tiny else 'smollm2')}_{date.today()}.json"
    for seed in options.seeds:
        for algorithm in options.algorithms:
            runs.append(_train(options, data, model, algorithm, seed, questions))
            print(_line(runs[-1]), flush=True)
            told = {name: value.name if isinstance(value, Path) else value for name, value in vars(options).items()}
            about = _about(argparse.Namespace(**told))
            result = {
                "fine_tuned": tuned,
                "runs": runs,
                "seeds": _over_seeds(runs),
                "seconds": round(time.perf_counter() - started, 1),
            }
            file.write_text(json.dumps(about | result, indent=1) + "\n")
    print("\n" + _table(runs))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, required=True, help="the folder of GSM8K's train.jsonl and test.jsonl")
    parser.add_argument("--out", type=Path, default=Path("checkpoints/learn"), help="where the runs' folders are")
    parser.add_argument("--algorithms", nargs="+", choices=COMMANDS, default=["grpo"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--tiny", action="store_true", help="a random model of two layers instead")
    parser.add_argument("--sft-epochs", type=int, default=2)
    parser.add_argument("--steps", type=int, default=40, help="steps of reinforcement learning")
    parser.add_argument("--prompts", type=int, default=256, help="prompts per step")
    parser.add_argument("--n", type=int, default=8, help="samples per prompt")
    parser.add_argument("--response", type=int, default=320, help="tokens of the longest response")
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--val-samples", type=int, default=-1, help="test questions; -1: all")
    parser.add_argument("--val-freq", type=int, default=20, help="steps between validations")
    parser.add_argument("--rows", type=int, default=-1, help="training rows; -1: all")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the result file")
    parser.add_argument("--name", help="middle part of the result file's name")
    return parser


def _lockstep(folder: Path, *words: str) -> None:
    """Run the command; its output goes to output.txt in `folder`. Raises SystemExit, with the end of it, when it fails."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "output.txt").open("w") as out:
        done = subprocess.run([sys.executable, "-m", "lockstep.cli", *words], stdout=out, stderr=subprocess.STDOUT, check=False)
    if done.returncode:
        last = "\n".join((folder / "output.txt").read_text().splitlines()[-20:])
        raise SystemExit(f"lockstep {words[0]} ended with status {done.returncode}:\n{last}")


def _data(options: argparse.Namespace) -> Path:
    data: Path = options.out / "data"
    if not (data / "test.parquet").is_file():
        _lockstep(options.out / "preprocess", "preprocess", "gsm8k", "--source", str(options.source), "--out", str(data))
    return data


def _fine_tuned(options: argparse.Namespace, data: Path) -> tuple[Path, dict[str, float]]:
    """The folder of the fine-tuned model, and what its run came to."""
    folder: Path = options.out / ("sft_tiny" if options.tiny else "sft")
    found = sorted(folder.glob("global_step_*/actor"), key=lambda path: int(path.parent.name.rpartition("_")[2]))
    if not found:
        _lockstep(
            folder, "sft", f"model.path={_tiny_model(options.out) if options.tiny else options.model}",
            f"data.train_files={data / 'train.parquet'}", "data.max_length=1024", f"data.train_max_samples={options.rows}",
            f"data.train_batch_size={min(64, options.rows) if options.rows > 0 else 64}", f"trainer.total_epochs={options.sft_epochs}",
            "optim.lr=1e-4", f"trainer.device={options.device}", f"trainer.default_local_dir={folder}",
        )  # fmt: skip
        found = sorted(folder.glob("global_step_*/actor"), key=lambda path: int(path.parent.name.rpartition("_")[2]))
    steps = _steps(folder)
    return found[-1], {
        "steps": len(steps), "seconds": round(sum(step["timing_s/step"] for step in steps), 1),
        "first_nll": round(steps[0]["train/nll"], 4), "last_nll": round(steps[-1]["train/nll"], 4),
    }  # fmt: skip


def _tiny_model(out: Path) -> Path:
    """A random model of two layers with SmolLM2's tokenizer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from lockstep.utils.tokenizer import hf_tokenizer

    folder = out / "tiny_model"
    tokenizer = hf_tokenizer("smollm2-135m")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        max_position_embeddings=2048, tie_word_embeddings=True, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _train(options: argparse.Namespace, data: Path, model: Path, algorithm: str, seed: int, questions: int) -> dict[str, Any]:
    """One run of reinforcement learning, and what its metrics say."""
    folder: Path = options.out / f"{algorithm}_{'tiny_' if options.tiny else ''}{seed}"
    if len(_steps(folder)) < options.steps:
        _lockstep(
            folder, COMMANDS[algorithm], f"actor_rollout_ref.model.path={model}",
            f"data.train_files={data / 'train.parquet'}", f"data.val_files={data / 'test.parquet'}",
            f"data.train_max_samples={options.rows}",
            f"data.val_max_samples={options.val_samples}", f"data.train_batch_size={options.prompts}",
            f"data.max_response_length={options.response}", f"actor_rollout_ref.rollout.n={options.n}",
            "actor_rollout_ref.rollout.val_kwargs.temperature=1.0", f"actor_rollout_ref.actor.optim.lr={options.lr}",
            *([f"critic.optim.lr={options.lr}"] if algorithm == "gae" else []),
            f"trainer.seed={seed}", f"trainer.total_training_steps={options.steps}", f"trainer.test_freq={options.val_freq}",
            "trainer.save_freq=0", f"trainer.device={options.device}", f"trainer.default_local_dir={folder}",
        )  # fmt: skip
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rewards = [round(row[REWARD], 5) for row in rows if REWARD in row]
    validation = [
        {
            "step": row["step"],
            "accuracy": round(value, 5),
            "interval": [round(x, 5) for x in wilson_interval(value * questions, questions)],
        }
        for row in rows
        for key, value in row.items()
        if key.startswith("val-core/") and key.endswith("mean@1")
    ]
    steps = [row["timing_s/step"] for row in rows if "timing_s/step" in row]
    return {
        "algorithm": algorithm, "seed": seed, "rewards": rewards, "questions": questions, "validation": validation,
        "first_step_s": round(steps[0], 2), "step_s": round(float(np.median(steps[1:] or steps)), 2), "seconds": round(sum(steps), 1),
    }  # fmt: skip


def _steps(folder: Path) -> list[dict[str, Any]]:
    """The metrics of the steps that a run has made."""
    file = folder / "metrics.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []
    return [row for row in rows if "timing_s/step" in row]


def _over_seeds(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Algorithm -> by how much the accuracy in validation grew, in the mean over seeds, with the t interval where there are several."""
    found = {}
    for algorithm in dict.fromkeys(run["algorithm"] for run in runs):
        grown = np.array([_growth(run) for run in runs if run["algorithm"] == algorithm])
        interval = [round(float(x), 5) for x in t_interval(grown)] if len(grown) > 1 else None
        found[algorithm] = {"seeds": len(grown), "growth": round(float(grown.mean()), 5), "interval": interval}
    return found


def _growth(run: dict[str, Any]) -> float:
    return run["validation"][-1]["accuracy"] - run["validation"][0]["accuracy"] if run["validation"] else float("nan")


def _line(run: dict[str, Any]) -> str:
    first, last = (float(np.mean(part)) for part in (run["rewards"][:SHOWN], run["rewards"][-SHOWN:]))
    shown = [f"{v['accuracy']:.3f} [{v['interval'][0]:.3f}, {v['interval'][1]:.3f}]" for v in run["validation"]]
    ends = f"{shown[0]} -> {shown[-1]}" if shown else "none"
    return (
        f"{run['algorithm']:6}{run['seed']:>5}{len(run['rewards']):>7}{first:>9.3f}{last:>9.3f}   {ends:46}"
        f"{run['first_step_s']:>8}{run['step_s']:>8}{run['seconds']:>9}"
    )


def _table(runs: Sequence[dict[str, Any]]) -> str:
    head = f"{'':6}{'seed':>5}{'steps':>7}{'reward':>9}{'at end':>9}   {'validation, before -> after (95 %)':46}"
    lines = [f"{head}{'first s':>8}{'step s':>8}{'all s':>9}", *map(_line, runs)]
    for algorithm, found in _over_seeds(runs).items():
        interval = " [{:.3f}, {:.3f}]".format(*found["interval"]) if found["interval"] else ""
        lines.append(f"{algorithm}: accuracy grew by {found['growth']:.3f}{interval} over {found['seeds']} seed(s)")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
