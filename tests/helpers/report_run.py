"""A run's folder as training writes it, made of numbers: for tests of `lockstep report`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

EPISODES = "val_0"
"""The samples that are episodes of two turns."""
HOSTILE = (
    "</script><script>window.hit=1</script>",
    "<!-- <script>window.hit=1</script>",
    "<img src=x onerror=window.hit=1>",
    "line\u2028separator\u2029and\u0000null\u001b[31m\u202eright to left",
    "lone \ud800 surrogate \udfff",
    "${window.hit=1} {{window.hit=1}} javascript:window.hit=1 \"' onload=window.hit=1",
)
"""Responses that would run as script, or break the file, in a careless page."""


def make_run(
    folder: Path, num_steps: int = 6, rows: int = 8, length: int = 12, responses: tuple[str, ...] = (), seed: int = 0
) -> Path:
    """Write a run of `num_steps` steps with `rows` samples each, two per prompt, of `length` tokens."""
    generator = np.random.default_rng(seed)
    (folder / "samples").mkdir(parents=True)
    lines = [{"step": 0, "time": 1000.0, "val-core/words/reward/mean@1": 0.25}]
    write_batch(folder, "val_0", generator, 4, length, responses)
    for step in range(1, num_steps + 1):
        write_batch(folder, f"train_{step}", generator, rows, length, responses)
        lines.append(
            {
                "step": step,
                "time": 1000.0 + 2 * step,
                "critic/score/mean": step / num_steps,
                "actor/entropy": 1.0 / step,
                "actor/grad_norm": "nan" if step == 2 else 0.5,
                "timing_s/gen": 1.0,
                "timing_s/update_actor": 0.5,
                "timing_s/step": 1.6,
                "perf/max_memory_allocated_gb/gen": 3.0 + step,
                "perf/max_memory_reserved_gb/gen": 4.0 + step,
            }
        )
    write_batch(folder, f"val_{num_steps}", generator, 4, length, responses)
    lines[-1] |= {"val-core/words/reward/mean@1": 0.75, "timing_s/testing": 0.3}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    config = "data:\n  train_batch_size: 4\nalgorithm:\n  gamma: 0.5\n  adv_estimator: gae\ntrainer:\n  seed: 7\n"
    (folder / "config.yaml").write_text(config)
    alarm = {
        "step": 3,
        "name": "entropy_collapse",
        "text": "fell <b>fast</b>",
        "numbers": {"entropy": 0.1},
        "key": "actor.entropy_coeff",
    }
    alarm["samples"] = [{"prompt": "q", "response": "<i>r</i>"}]
    (folder / "alarms.jsonl").write_text(json.dumps(alarm) + "\n")
    return folder


def write_batch(
    folder: Path, name: str, generator: np.random.Generator, rows: int, length: int, responses: tuple[str, ...]
) -> None:
    """Write samples/`name`.npz: rewards 0 and 1 in turn, responses in turn, lengths from `length` on downwards."""
    lengths = np.array([max(1, length - i % 5) for i in range(rows)], np.int32)
    total = int(lengths.sum())
    tokens = generator.integers(0, 50, total).astype(np.int32)
    columns = {
        name: generator.normal(size=total).astype(np.float16)
        for name in ("log_ratio", "sampler_log_ratio", "kl", "values", "token_level_rewards", "advantages", "returns", "entropys")
    }
    columns["log_probs"] = -np.abs(generator.normal(size=total)).astype(np.float16)
    mask = np.ones(total, np.uint8)
    if name == EPISODES:  # of its first row the policy wrote tokens 0 to 2 and 5 on, an environment those between
        mask[3:5] = 0
        columns["log_probs"][3:5] = np.nan
        columns["turn"] = np.repeat(np.array([1, 2], np.float16), [5, total - 5])
    vocabulary = {str(i): f" w{i}" for i in range(50)}
    if responses:
        vocabulary[str(tokens[0])] = responses[0]
    ends = np.cumsum(lengths)
    written = ["".join(f" w{t}" for t in tokens[end - n : end]) for end, n in zip(ends, lengths, strict=True)]
    texts: list[dict[str, Any]] = [
        {
            "prompt": f"{name} question {i // 2}" if name.startswith("train") else f"held-out {i}",
            "response": responses[i % len(responses)] if responses else written[i],
            "truth": f"answer {i // 2}",
            "source": "words",
            "group": str(i // 2),
            "length": int(lengths[i]),
            "finish": "length" if i % 5 == 0 else "stop",
            "reward": None if i == 7 else float(i % 2),
            "failure": "raised: ValueError: no answer" if i == 7 else None,
            "said": {"acc": i % 2 == 1},
        }
        for i in range(rows)
    ]
    counts = {"words": {"rows": rows, "prompts": rows // 2, "is_binary": True}}
    record = json.dumps({"rows": texts, "vocabulary": vocabulary, "sources": counts}).encode()
    np.savez_compressed(
        folder / "samples" / f"{name}.npz",
        rows=np.frombuffer(record, np.uint8),
        lengths=lengths,
        tokens=tokens,
        mask=mask,
        **columns,
    )
