"""Whole steps with what is chosen for keys that are `auto`, beside numbers set by hand: `lockstep grpo` on GSM8K.

    python -m benchmarks.auto_steps --source DIR
    python -m benchmarks.auto_steps --source DIR --device cpu --prompts 2 --n 2 --response 8 --steps 2

DIR has GSM8K's train.jsonl and test.jsonl. Each line is a run of its own, one after the other. The table has the first
step, and the median of those after it; benchmarks/results/auto_steps_*.json has all of them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import forked

_ROLLOUT = "actor_rollout_ref.rollout"
LINES = {
    "auto": [],
    "256, 8k, 0.5": [f"{_ROLLOUT}.max_num_seqs=256", f"{_ROLLOUT}.max_num_batched_tokens=8192", f"{_ROLLOUT}.gpu_memory_utilization=0.5"],
    "1024, 32k, 0.5": [
        f"{_ROLLOUT}.max_num_seqs=1024", f"{_ROLLOUT}.max_num_batched_tokens=32768", f"{_ROLLOUT}.gpu_memory_utilization=0.5",
    ],
    "2048, 8k, 0.8": [f"{_ROLLOUT}.max_num_seqs=2048", f"{_ROLLOUT}.max_num_batched_tokens=8192", f"{_ROLLOUT}.gpu_memory_utilization=0.8"],
}  # fmt: skip
"""The name of a line -> keys: sequences at once, tokens of a pass, share of the free memory."""
SHOWN = ("step", "gen", "old_log_prob", "reward", "update_actor")


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(arguments)
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        forked.finish(
            ["preprocess", "gsm8k", "--source", str(options.source), "--out", str(folder / "data")], folder / "preprocess"
        )
        for line in options.lines:
            rows.append(_measure(options, folder, line))
            print(rows[-1], flush=True)
    print("\n" + _table(rows))
    import torch

    from benchmarks.step import _about  # only now: the runs do not wait for its imports

    told = {key: value.name if isinstance(value, Path) else value for key, value in vars(options).items()}
    on_gpu = options.device != "cpu" and torch.cuda.is_available()
    about = _about(argparse.Namespace(**told | {"device": "cuda" if on_gpu else "cpu"}))
    file = options.results / f"auto_steps_{options.name or 'smollm2'}_{about['date']}.json"
    file.write_text(json.dumps(about | {"rows": rows}, indent=1) + "\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, required=True, help="the folder of GSM8K's train.jsonl and test.jsonl")
    parser.add_argument("--lines", nargs="+", choices=LINES, default=list(LINES))
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--prompts", type=int, default=256, help="prompts per step")
    parser.add_argument("--n", type=int, default=8, help="samples per prompt")
    parser.add_argument("--response", type=int, default=320, help="tokens of the longest response")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--keys", nargs="*", default=[], help="more keys for every line, as key=value")
    parser.add_argument("--device", default="auto", help="of the runs")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results", help="folder of the result file")
    parser.add_argument("--name", help="middle part of the result file's name")
    return parser


def _measure(options: argparse.Namespace, folder: Path, line: str) -> dict[str, Any]:
    run = folder / line.replace(", ", "_")
    words = [
        "grpo", f"data.train_files={folder / 'data' / 'train.parquet'}", f"actor_rollout_ref.model.path={options.model}",
        f"data.train_batch_size={options.prompts}", f"data.max_response_length={options.response}", f"{_ROLLOUT}.n={options.n}",
        f"trainer.total_training_steps={options.steps}", "trainer.save_freq=0", f"trainer.device={options.device}",
        f"trainer.default_local_dir={run}", *LINES[line], *options.keys,
    ]  # fmt: skip
    forked.finish(words, run)
    steps = [json.loads(text) for text in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [step for step in steps if "timing_s/step" in step]
    chosen = [text for text in (run / "output.txt").read_text().splitlines() if text.startswith("chosen for auto")]
    first, later = steps[0], steps[1:] or steps
    names = [name for name in SHOWN if f"timing_s/{name}" in first]
    return {
        "line": line, "chosen": chosen, "response_length": round(first["response_length/mean"], 1),
        "first_s": {name: round(first[f"timing_s/{name}"], 3) for name in names},
        "then_s": {name: round(statistics.median(step[f"timing_s/{name}"] for step in later), 3) for name in names},
        "steps_s": [round(step["timing_s/step"], 3) for step in steps],
    }  # fmt: skip


def _table(rows: Sequence[dict[str, Any]]) -> str:
    lines = [f"{'numbers':16}{'first s':>9}{'then s':>9}{'gen s':>8}{'first / then':>14}{'of best':>9}"]
    best = min(row["then_s"]["step"] for row in rows)
    for row in rows:
        first, then = row["first_s"]["step"], row["then_s"]["step"]
        gen = row["then_s"].get("gen", float("nan"))
        lines.append(f"{row['line']:16}{first:>9.2f}{then:>9.2f}{gen:>8.2f}{first / then:>14.2f}{best / then:>9.1%}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
