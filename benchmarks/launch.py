"""The whole program: `lockstep ppo` started as a user starts it, from the command to the end of its first step, and the steps after it.

    python -m benchmarks.launch --shape 1.5b --prompts 128 --n 8 --prompt 218 --response 512
    python -m benchmarks.launch --shape tiny --prompts 4 --n 4 --prompt 32 --response 16 --device cpu

Files as a user would bring them: a Hugging Face folder with random weights and a tokenizer of the shape's whole vocabulary, a parquet
file, a reward function. Everything is in the numbers: imports, checks, loading, tokenising, decoding, rewards, metrics, every sample
written to a file. Random weights hardly ever write the end token, so responses have their full length. The table has the first step and
the mean of the others.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import string
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from tokenizers import pre_tokenizers
from transformers import Qwen2Tokenizer

from benchmarks.step import RESULTS, _about, _save_model
from benchmarks.workload import SHAPES

REWARD = """import zlib


def compute_score(data_source, solution_str, ground_truth, extra_info):
    return zlib.crc32(solution_str.encode()) % 1000 / 1000
"""
"""A number for every text, the same each time: what is measured is the work, not the learning."""


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(arguments)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _write_files(options, folder)
        result = _run(options, folder)
    print(_table(result))
    about = _about(options)
    RESULTS.mkdir(exist_ok=True)
    file = RESULTS / f"launch_{options.name or options.shape}_{about['date']}.json"
    file.write_text(json.dumps(about | result, indent=1) + "\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="1.5b")
    parser.add_argument("--prompts", type=int, default=128)
    parser.add_argument("--n", type=int, default=8, help="samples per prompt")
    parser.add_argument("--prompt", type=int, default=218, help="tokens of a prompt")
    parser.add_argument("--response", type=int, default=512, help="tokens of a response")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--algorithm", choices=("grpo", "ppo"), default="grpo", help="ppo: with a critic of the same size")
    parser.add_argument("--max-tokens", type=int, default=32_768, help="tokens of a micro-batch")
    parser.add_argument("--auto", action="store_true", help="leave micro-batches, sequences at once and the cache to the plan")
    parser.add_argument("--worker-group", choices=("local", "ray"), default="local")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--name", help="of the results file, instead of the shape's")
    parser.add_argument("keys", nargs="*", help="more keys for the program, as key=value")
    return parser


def _write_files(options: argparse.Namespace, folder: Path) -> None:
    """model/, train.parquet, reward.py."""
    vocabulary = SHAPES[options.shape]["vocab_size"]
    _save_model(options, folder / "model")
    # Without merges every byte is a token; the other ids have texts, which are decoded, but which no text is made of.
    words = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(f"word{i}" for i in range(vocabulary))][: vocabulary - 2]
    ids = {word: i for i, word in enumerate([*words, "<|endoftext|>", "<|im_end|>"])}
    tokenizer = Qwen2Tokenizer(vocab=ids, merges=[], pad_token="<|endoftext|>", eos_token="<|im_end|>")
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    tokenizer.save_pretrained(folder / "model")
    rng = random.Random(0)
    rows = [
        {
            "data_source": "random",
            "prompt": [{"role": "user", "content": "".join(rng.choices(string.ascii_letters, k=options.prompt))}],
            "reward_model": {"style": "rule", "ground_truth": ""},
        }
        for _ in range(options.prompts * options.steps)
    ]
    pq.write_table(pa.Table.from_pylist(rows), folder / "train.parquet")
    (folder / "reward.py").write_text(REWARD)


def _run(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    keys = [
        f"data.train_files={folder / 'train.parquet'}",
        f"data.train_batch_size={options.prompts}",
        f"data.max_prompt_length={options.prompt}",
        f"data.max_response_length={options.response}",
        f"actor_rollout_ref.model.path={folder / 'model'}",
        f"actor_rollout_ref.rollout.n={options.n}",
        f"reward.custom_reward_function.path={folder / 'reward.py'}",
        f"algorithm.adv_estimator={'gae' if options.algorithm == 'ppo' else 'grpo'}",
        f"trainer.total_training_steps={options.steps}",
        f"trainer.default_local_dir={folder / 'run'}",
        f"trainer.rollout_data_dir={folder / 'samples'}",
        f"trainer.worker_group={options.worker_group}",
        f"trainer.device={options.device}",
        "trainer.save_freq=0",
        *([] if options.auto else _by_hand(options)),
        *options.keys,
    ]
    metrics = folder / "run" / "metrics.jsonl"
    started, first = time.perf_counter(), None
    program = subprocess.Popen(
        [sys.executable, "-m", "lockstep.trainer.main_ppo", *keys], env=os.environ | {"PYTHONUNBUFFERED": "1"}
    )
    while program.poll() is None:
        if first is None and metrics.exists() and metrics.read_text().endswith("\n"):
            first = time.perf_counter() - started
            print(f"first step done {first:.1f} s after the start of the program", flush=True)
        time.sleep(0.05)
    whole = time.perf_counter() - started
    if program.returncode or first is None:
        raise SystemExit(f"the program ended with status {program.returncode}")
    steps = [json.loads(line) for line in metrics.read_text().splitlines()]
    timed = sorted(name for name in steps[0] if name.startswith("timing_s/"))
    later = steps[1:] or steps
    return {
        "launch_to_first_step_s": round(first, 2),
        "whole_program_s": round(whole, 2),
        "first_step_s": {name.removeprefix("timing_s/"): round(steps[0][name], 3) for name in timed},
        "stage_s": {name.removeprefix("timing_s/"): round(sum(s.get(name, 0.0) for s in later) / len(later), 3) for name in timed},
        "metrics": {
            name: round(value, 5)
            for name, value in steps[-1].items()
            if name.startswith(("perf/", "training/rollout", "prompt_length/mean", "response_length/mean"))
        },
        "tokens": options.prompts * options.n * (options.prompt + options.response),
    }


def _by_hand(options: argparse.Namespace) -> list[str]:
    """Numbers for keys that are auto otherwise."""
    return [
        f"actor_rollout_ref.actor.ppo_max_token_len_per_gpu={options.max_tokens}",
        f"actor_rollout_ref.rollout.max_num_seqs={min(1024, options.prompts * options.n)}",
        f"critic.ppo_max_token_len_per_gpu={options.max_tokens}",
    ]


def _table(result: dict[str, Any]) -> str:
    lines = [
        f"{result['tokens']} tokens per step; first step done after {result['launch_to_first_step_s']} s, "
        f"the program after {result['whole_program_s']} s",
        f"{'stage':16}{'first':>10}{'then':>10}",
    ]
    lines += [f"{name:16}{s:10.3f}{result['stage_s'][name]:10.3f}" for name, s in result["first_step_s"].items()]
    return "\n".join(lines + [f"{name} = {value}" for name, value in result["metrics"].items()])


if __name__ == "__main__":
    main()
