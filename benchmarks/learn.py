"""Does it learn? SmolLM2 is fine-tuned on GSM8K's solutions, then trained with rewards: reward over time, and validation with intervals.

    python -m benchmarks.learn --source DIR --algorithms grpo gae rloo dapo --seeds 0 1 2
    python -m benchmarks.learn --source DIR --algorithms grpo gae rloo dapo --at-once --seconds 290 --prompts 128 --steps 30
    python -m benchmarks.learn --source DIR --tiny --device cpu --steps 2

DIR has GSM8K's train.jsonl and test.jsonl. The programs are a user's commands: `lockstep preprocess`, `lockstep sft`, then `lockstep grpo`
(`ppo` for gae, `rloo`, `dapo`) from the fine-tuned model, for each seed: one after the other, or all of them at once on one device, where
each gets an equal share of the memory. A run whose folder is complete is not made again; a folder of another command is an error.
Validation is one or more samples at temperature 1 for each test question, with the 95 % interval that the run tells; over several seeds,
the t interval of how much it grew until the last step at which all of them were validated. Rewards are those of the rows that are trained
on: dapo's, of the groups that it keeps and less its penalty for length, are not comparable with the others'.
--tiny is a random model with SmolLM2's tokenizer, for a look at the script itself (dapo ends with an error then: no group of its responses
differs). One table, and benchmarks/results/learn_*.json, written anew whenever a run has told something.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from benchmarks import forked
from benchmarks.step import RESULTS, _about
from lockstep.observability.statistics import t_95, t_interval

COMMANDS = {"grpo": "grpo", "gae": "ppo", "rloo": "rloo", "dapo": "dapo"}
"""Algorithm -> the command that is its preset."""
REWARD = "critic/score/mean"
SHOWN = 10
"""Steps whose mean reward is shown, at the beginning and at the end; a third of them where there are fewer than 30."""
_POLL_S = 2.0

Run = tuple[str, int]
"""Algorithm and seed."""


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(arguments)
    started = time.monotonic() - (time.time() - psutil.Process().create_time())  # imports count
    data = _data(options)
    model, tuned = _fine_tuned(options, data)
    print(f"fine-tuned: {tuned}", flush=True)
    runs = [(algorithm, seed) for seed in options.seeds for algorithm in options.algorithms]
    file = options.results / f"learn_{options.name or ('tiny' if options.tiny else 'smollm2')}_{date.today()}.json"
    told = {name: value.name if isinstance(value, Path) else value for name, value in vars(options).items()}
    about = _about(argparse.Namespace(**told)) | {"fine_tuned": tuned}

    def save() -> list[dict[str, Any]]:
        found = [_result(_folder(options, run), run) for run in runs if _rows(_folder(options, run))]
        result = {"runs": found, "over_seeds": _over_seeds(found), "seconds": round(time.monotonic() - started, 1)}
        file.write_text(json.dumps(about | result, indent=1) + "\n")
        return found

    jobs = {run: _words(options, data, model, run) for run in runs}
    for run, words in jobs.items():
        _claim(_folder(options, run), words)
    jobs = {run: words for run, words in jobs.items() if len(_steps(_folder(options, run))) < options.steps}
    for part in [jobs] if options.at_once else [{run: words} for run, words in jobs.items()]:
        _run_all(options, part, started + options.seconds, save)
    print("\n" + _table(save()))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, required=True, help="the folder of GSM8K's train.jsonl and test.jsonl")
    parser.add_argument("--out", type=Path, default=Path("checkpoints/learn"), help="where the runs' folders are")
    parser.add_argument("--algorithms", nargs="+", choices=COMMANDS, default=["grpo"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--tiny", action="store_true", help="a random model of two layers instead")
    parser.add_argument("--sft-epochs", type=int, default=2, help="of the fine-tuning; 0: none")
    parser.add_argument("--steps", type=int, default=40, help="steps of reinforcement learning")
    parser.add_argument("--prompts", type=int, default=256, help="prompts per step")
    parser.add_argument("--n", type=int, default=8, help="samples per prompt")
    parser.add_argument("--response", type=int, default=320, help="tokens of the longest response")
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--val-samples", type=int, default=-1, help="test questions; -1: all")
    parser.add_argument("--val-freq", type=int, default=20, help="steps between validations")
    parser.add_argument("--val-n", type=int, default=1, help="samples per test question")
    parser.add_argument("--rows", type=int, default=-1, help="training rows; -1: all")
    parser.add_argument("--sft-rows", type=int, default=-1, help="of these, rows of the fine-tuning; -1: all")
    parser.add_argument("--at-once", action="store_true", help="all runs at the same time, on one device")
    parser.add_argument("--memory", type=float, default=0.9, help="of the GPU's memory, what runs at once share")
    parser.add_argument("--seconds", type=float, default=86_400.0, help="runs are ended when the script has taken this long")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the result file")
    parser.add_argument("--name", help="middle part of the result file's name")
    return parser


def _run_all(options: argparse.Namespace, jobs: dict[Run, list[str]], deadline: float, save: Callable[[], object]) -> None:
    """Run these at the same time until they are over or the time is; `save` whenever one has told something."""
    threads, share = (max(1, (os.cpu_count() or 1) // len(jobs)), options.memory / len(jobs)) if len(jobs) > 1 else (None, None)
    # The plan of each sees what is left to it, not what is free before the others have started.
    memory = share if options.device == "cuda" else None
    running = {run: forked.start(words, _folder(options, run), memory, threads) for run, words in jobs.items()}
    told = 0
    try:
        while running and time.monotonic() < deadline:
            time.sleep(min(_POLL_S, max(0.0, deadline - time.monotonic())))
            for run in [run for run, process in running.items() if process.exitcode is not None]:
                if status := running.pop(run).exitcode:
                    print(f"{run} ended with status {status}:\n{forked.last_lines(_folder(options, run))}", flush=True)
            count = sum(len(_rows(_folder(options, run))) for run in jobs)
            if count > told:
                told = count
                save()
    finally:
        for process in running.values():  # nothing is lost: the metrics are written after each step
            process.kill()
            process.join()


def _claim(folder: Path, words: list[str]) -> None:
    """The folder is that of this command, now and later. Raises SystemExit where it is that of another, whose numbers are not ours."""
    file = folder / "command.json"
    if file.is_file() and (other := json.loads(file.read_text())) != words:
        changed = " ".join(word for word in other if word not in words)
        raise SystemExit(f"{folder} has a run of another command ({changed}): choose another --out, or delete it")
    folder.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(words) + "\n")


def _data(options: argparse.Namespace) -> Path:
    data: Path = options.out / "data"
    if not (data / "test.parquet").is_file():
        words = ["preprocess", "gsm8k", "--source", str(options.source), "--out", str(data)]
        forked.finish(words, options.out / "preprocess")
    return data


def _fine_tuned(options: argparse.Namespace, data: Path) -> tuple[Path, dict[str, float]]:
    """The folder of the fine-tuned model, and what its run came to; the model as it is without epochs."""
    if not options.sft_epochs:
        return _tiny_model(options.out) if options.tiny else Path(options.model), {}
    folder: Path = options.out / ("sft_tiny" if options.tiny else "sft")
    rows = options.sft_rows if options.sft_rows > 0 else options.rows
    words = [
        "sft", f"model.path={_tiny_model(options.out) if options.tiny else options.model}",
        f"data.train_files={data / 'train.parquet'}", "data.max_length=1024", f"data.train_max_samples={rows}",
        f"data.train_batch_size={min(64, rows) if rows > 0 else 64}", f"trainer.total_epochs={options.sft_epochs}",
        "optim.lr=1e-4", f"trainer.device={options.device}", f"trainer.default_local_dir={folder}",
    ]  # fmt: skip
    _claim(folder, words)
    found = sorted(folder.glob("global_step_*/actor"), key=lambda path: int(path.parent.name.rpartition("_")[2]))
    if not found:
        forked.finish(words, folder)
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


def _folder(options: argparse.Namespace, run: Run) -> Path:
    algorithm, seed = run
    return Path(options.out) / f"{algorithm}_{'tiny_' if options.tiny else ''}{seed}"


def _words(options: argparse.Namespace, data: Path, model: Path, run: Run) -> list[str]:
    """The command of a run."""
    algorithm, seed = run
    return [
        COMMANDS[algorithm], f"actor_rollout_ref.model.path={model}",
        f"data.train_files={data / 'train.parquet'}", f"data.val_files={data / 'test.parquet'}",
        f"data.train_max_samples={options.rows}", f"data.val_max_samples={options.val_samples}",
        f"data.train_batch_size={options.prompts}", f"data.max_response_length={options.response}",
        f"actor_rollout_ref.rollout.n={options.n}", f"actor_rollout_ref.actor.optim.lr={options.lr}",
        "actor_rollout_ref.rollout.val_kwargs.temperature=1.0", f"actor_rollout_ref.rollout.val_kwargs.n={options.val_n}",
        *([f"critic.optim.lr={options.lr}"] if algorithm == "gae" else []),
        f"trainer.seed={seed}", f"trainer.total_training_steps={options.steps}", f"trainer.test_freq={options.val_freq}",
        "trainer.val_before_train_samples=-1", "trainer.save_freq=0", f"trainer.device={options.device}",
        f"trainer.default_local_dir={_folder(options, run)}",
    ]  # fmt: skip


def _result(folder: Path, run: Run) -> dict[str, Any]:
    """What the metrics of a run say, as far as it has come."""
    rows = _rows(folder)
    validation = [
        {"step": row["step"], "metric": key.rpartition("/")[2], "accuracy": round(value, 5), "interval": _interval(row, key)}
        for row in rows
        for key, value in row.items()
        if key.startswith("val-core/") and key.rpartition("/")[2].startswith("mean@")
    ]
    rewards = [row[REWARD] for row in rows if REWARD in row]
    steps = [row["timing_s/step"] for row in rows if "timing_s/step" in row]
    return {
        "algorithm": run[0], "seed": run[1], "rewards": [round(reward, 5) for reward in rewards], "rise": _rise(rewards),
        "validation": validation, "first_step_s": round(steps[0], 2) if steps else None,
        "step_s": round(float(np.median(steps[1:] or steps)), 2) if steps else None, "seconds": round(sum(steps), 1),
    }  # fmt: skip


def _interval(row: dict[str, Any], key: str) -> list[float]:
    """The 95 % interval that the run tells beside the number."""
    aside = key.replace("val-core/", "val-aux/", 1)
    return [round(row[f"{aside}/{end}"], 5) for end in ("low", "high")]


def _shown(rewards: Sequence[float]) -> int:
    return max(1, min(SHOWN, len(rewards) // 3))


def _rise(rewards: Sequence[float]) -> dict[str, Any] | None:
    """By how much the mean reward of the last steps is above that of the first, with Welch's 95 % interval over steps. None where there are
    too few of them, or they are all equal: then nothing says how far a mean is from the true one."""
    count = _shown(rewards)
    if count < 3:
        return None
    first, last = np.array(rewards[:count]), np.array(rewards[-count:])
    rise, parts = float(last.mean() - first.mean()), np.array([part.var(ddof=1) / count for part in (first, last)])
    if not parts.any():
        return None
    freedom = parts.sum() ** 2 / (parts**2 / (count - 1)).sum()
    half = t_95(max(1, int(freedom))) * float(np.sqrt(parts.sum()))
    return {"steps": count, "from": round(float(first.mean()), 5), "by": round(rise, 5),
            "interval": [round(rise - half, 5), round(rise + half, 5)]}  # fmt: skip


def _rows(folder: Path) -> list[dict[str, Any]]:
    """The metrics that a run has told; a line that is being written is left out."""
    file = folder / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True) if file.is_file() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def _steps(folder: Path) -> list[dict[str, Any]]:
    """The metrics of the steps that a run has made."""
    return [row for row in _rows(folder) if "timing_s/step" in row]


def _over_seeds(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Algorithm -> by how much the accuracy in validation grew, in the mean over seeds, with the t interval where several differ.

    From before the first step to the last one at which all of its seeds were validated; seeds that were validated once say nothing.
    """
    found: dict[str, Any] = {}
    for algorithm in dict.fromkeys(run["algorithm"] for run in runs):
        told = [{v["step"]: v["accuracy"] for v in run["validation"]} for run in runs if run["algorithm"] == algorithm]
        told = [accuracies for accuracies in told if len(accuracies) > 1]
        common = set(told[0]).intersection(*told) if told else set()
        if len(common) < 2:
            found[algorithm] = {"seeds": 0, "steps": 0, "growth": None, "interval": None}
            continue
        grown = np.array([accuracies[max(common)] - accuracies[min(common)] for accuracies in told])
        interval = [round(float(x), 5) for x in t_interval(grown)] if len(grown) > 1 and grown.std() else None
        growth = round(float(grown.mean()), 5)
        found[algorithm] = {"seeds": len(grown), "steps": max(common), "growth": growth, "interval": interval}
    return found


def _line(run: dict[str, Any]) -> str:
    count = _shown(run["rewards"])
    first, last = (float(np.mean(part)) if part else float("nan") for part in (run["rewards"][:count], run["rewards"][-count:]))
    shown = [f"{v['accuracy']:.3f} [{v['interval'][0]:.3f}, {v['interval'][1]:.3f}]" for v in run["validation"]]
    ends = f"{shown[0]} -> {shown[-1]}" if shown else "none"
    rise = "[{:+.3f}, {:+.3f}]".format(*run["rise"]["interval"]) if run["rise"] else ""
    return (
        f"{run['algorithm']:6}{run['seed']:>5}{len(run['rewards']):>7}{first:>9.3f}{last:>9.3f}  {rise:18}{ends:46}"
        f"{run['first_step_s']!s:>8}{run['step_s']!s:>8}{run['seconds']:>9}"
    )


def _table(runs: Sequence[dict[str, Any]]) -> str:
    head = f"{'':6}{'seed':>5}{'steps':>7}{'reward':>9}{'at end':>9}  {'rise (95 %)':18}{'validation, before -> after (95 %)':46}"
    lines = [f"{head}{'first s':>8}{'step s':>8}{'all s':>9}", *map(_line, runs)]
    for algorithm, found in _over_seeds(runs).items():
        if found["growth"] is None:
            lines.append(f"{algorithm}: not validated twice")
            continue
        interval = " [{:.3f}, {:.3f}]".format(*found["interval"]) if found["interval"] else " (no interval: no seeds that differ)"
        lines.append(
            f"{algorithm}: accuracy grew by {found['growth']:.3f}{interval} in {found['steps']} steps, {found['seeds']} seed(s)"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
