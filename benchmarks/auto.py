"""What is chosen for keys that are `auto` beside the best numbers set by hand: generation from random weights of real shapes.

    python -m benchmarks.auto --shapes 135m 0.5b 1.5b 7b
    python -m benchmarks.auto --shapes tiny --prompts 4 --device cpu

Each shape generates the load (gsm8k_like: 8 samples a prompt) with the numbers that the plan chooses for it and with several by hand; the
cache is given back after each generation, as in training, so that graphs are captured anew each time. First, greedily and in float32 on a
tiny model: whatever the numbers, and with or without a warm-up, the tokens are the same (random weights spread the probability so evenly
that drawn tokens depend on the last bit of a sum). One table, and benchmarks/results/auto_*.json.
"""

import argparse
import dataclasses
import json
import tempfile
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from transformers import PreTrainedModel

from benchmarks.rollout import _model, _requests, _sampling
from benchmarks.step import RESULTS, _about
from benchmarks.workload import SHAPES, Load, gsm8k_like
from lockstep.config.actor_rollout_ref import RolloutConfig
from lockstep.config.engine import ModelConfig
from lockstep.models.load import share_structure
from lockstep.planner import count
from lockstep.planner.choose import PLAIN, RolloutNumbers, choose_rollout
from lockstep.utils.garbage import frozen_objects
from lockstep.utils.memory import free_device_memory
from lockstep.workers.rollout.registry import make_rollout

BY_HAND = {
    "256, 8k, 0.5": RolloutNumbers(256, 8192, 0.5),
    "1024, 8k, 0.5": RolloutNumbers(1024, 8192, 0.5),
    "2048, 8k, 0.8": RolloutNumbers(2048, 8192, 0.8),
    "2048, 32k, 0.8": RolloutNumbers(2048, 32_768, 0.8),
}
"""The name of a line -> sequences at once, tokens of a pass, share of the free memory."""
LONGEST = 260 + 1024
"""Tokens of the longest row of the load."""


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(arguments)
    _check(options)
    rows: list[dict[str, Any]] = []
    with frozen_objects():  # as in training
        for shape in options.shapes:
            prompts = min(options.prompts, 128) if shape == "7b" else options.prompts
            rows += _measure(shape, gsm8k_like(prompts), options)
    print("\n" + _table(rows))
    file = RESULTS / f"auto_{options.name or 'gsm8k_like'}_{_about(options)['date']}.json"
    file.write_text(json.dumps(_about(options) | {"rows": rows}, indent=1) + "\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["135m", "0.5b", "1.5b", "7b"])
    parser.add_argument("--prompts", type=int, default=256, help="8 samples each; 7b has 128 at most")
    parser.add_argument("--hand", nargs="+", choices=BY_HAND, default=list(BY_HAND), help="the lines beside auto's")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--name", help="middle part of the result file's name")
    return parser


def _module(shape: str, device: str, dtype: torch.dtype) -> PreTrainedModel:
    return _model(SimpleNamespace(model=None, shape=shape), torch.device(device), dtype)  # type: ignore[arg-type]


def _engine(model: PreTrainedModel, numbers: RolloutNumbers) -> Any:
    return make_rollout(share_structure(model, "lockstep_cached"), RolloutConfig(**dataclasses.asdict(numbers)), pad_token_id=0)


def _check(options: argparse.Namespace) -> None:
    """Raise AssertionError unless the tokens are the same whatever the numbers."""
    model, load = _module("tiny", options.device, torch.float32), gsm8k_like(6)
    found = []
    for numbers, warm in (
        (PLAIN, False),
        (PLAIN, True),
        (RolloutNumbers(2048, 32_768, 0.8), True),
        (RolloutNumbers(5, 100, 0.1), False),
    ):
        engine = _engine(model, numbers)
        if warm:
            _warm_up(engine, load)
        found.append(
            [completion.ids.tolist() for completion in engine.generate(_requests(load), _sampling(load, {"temperature": 0.0}))]
        )
        engine.sleep()
    assert all(tokens == found[0] for tokens in found[1:]), "the numbers changed the tokens"
    print(f"{load.num_tokens} tokens are the same for four choices of numbers", flush=True)


def _warm_up(engine: Any, load: Load) -> None:
    if engine.module.device.type == "cuda":
        from lockstep.workers.rollout.native.gpu.warm_up import warm_generation

        warm_generation(engine, dataclasses.replace(_sampling(load, {}), max_tokens=2), 8)


def _measure(shape: str, load: Load, options: argparse.Namespace) -> list[dict[str, Any]]:
    model = _module(shape, options.device, torch.bfloat16 if options.device == "cuda" else torch.float32)
    chosen = _chosen(model, len(load.lengths))
    lines = {"auto": chosen} | {name: BY_HAND[name] for name in options.hand}
    rows, done = [], {}
    for name, numbers in lines.items():
        key = (min(numbers.max_num_seqs, len(load.lengths)), numbers.max_num_batched_tokens, numbers.gpu_memory_utilization >= 0.8)
        if key not in done:  # numbers that come to the same are measured once
            done[key] = _seconds(model, load, numbers)
        warm, seconds = done[key]
        rows.append(
            {"shape": shape, "line": name, **dataclasses.asdict(numbers), "rows": len(load.lengths), "warm_up_s": round(warm, 2),
             "seconds": round(seconds, 3), "tokens_per_s": round(load.num_tokens / seconds)}
        )  # fmt: skip
        print(rows[-1], flush=True)
    del model
    if options.device == "cuda":
        torch.cuda.empty_cache()
    return rows


def _chosen(model: PreTrainedModel, rows: int) -> RolloutNumbers:
    """What the plan chooses for this load on what is free now."""
    free = free_device_memory(model.device)
    if free is None:
        return PLAIN
    with tempfile.TemporaryDirectory() as folder:
        model.config.save_pretrained(folder)
        rollout = count.count_rollout(
            RolloutConfig(), ModelConfig(path=folder), actor=None, world_size=1, element=2, load=count.Load(LONGEST, rows, rows)
        )
    return choose_rollout(rollout, count.Load(LONGEST, rows, rows), free)


def _seconds(model: PreTrainedModel, load: Load, numbers: RolloutNumbers) -> tuple[float, float]:
    """Seconds of the warm-up, and of a generation after one that is not counted."""
    engine, times = _engine(model, numbers), []
    for part in ("warm", "first", "then"):
        start = time.perf_counter()
        if part == "warm":
            _warm_up(engine, load)
        else:
            engine.generate(_requests(load), _sampling(load, {}))
            engine.sleep()
        times.append(time.perf_counter() - start)
    return times[0], times[2]


def _table(rows: Sequence[dict[str, Any]]) -> str:
    lines = [f"{'shape':6}{'numbers':16}{'seats':>6}{'pass':>7}{'share':>7}{'warm-up s':>10}{'s':>8}{'tokens/s':>10}{'of best':>9}"]
    for row in rows:
        best = max(other["tokens_per_s"] for other in rows if other["shape"] == row["shape"])
        lines.append(
            f"{row['shape']:6}{row['line']:16}{row['max_num_seqs']:>6}{row['max_num_batched_tokens']:>7}{row['gpu_memory_utilization']:>7}"
            f"{row['warm_up_s']:>10}{row['seconds']:>8}{row['tokens_per_s']:>10}{row['tokens_per_s'] / best:>9.1%}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
