"""What is chosen for keys that are `auto` beside the best numbers set by hand: generation from random weights of real shapes.

    python -m benchmarks.auto --shapes 135m 0.5b 1.5b 7b --gsm8k DIR
    python -m benchmarks.auto --shapes tiny --prompts 4 --device cpu

Each shape generates the load (gsm8k_like: 8 samples a prompt) with the numbers that the plan chooses for it and with several by hand, in
turn, after a warm-up: the median of some rounds counts. The cache is given back after each generation, as in training, so that graphs are
captured anew each time; Python's garbage is collected before it, not in it. --gsm8k: each shape also on questions of GSM8K (DIR has
train.jsonl), 8 samples each, with responses as long as GSM8K's own answers; and SmolLM2-135M itself on these questions, up to 320 tokens
or the end token, and on the load above. First, greedily and in float32 on a tiny model:
whatever the numbers, and with or without a warm-up, the tokens are the same (random weights spread the probability so evenly that drawn
tokens depend on the last bit of a sum). One table, and benchmarks/results/auto_*.json.
"""

import argparse
import dataclasses
import gc
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from benchmarks.rollout import _model, _requests, _sampling
from benchmarks.step import RESULTS, _about
from benchmarks.workload import SHAPES, Load, gsm8k_like
from lockstep.config.actor_rollout_ref import RolloutConfig
from lockstep.config.engine import ModelConfig
from lockstep.config.sampling import SamplingParams
from lockstep.data.preprocess.gsm8k import INSTRUCTION
from lockstep.data.preprocess.recipe import ask
from lockstep.models.load import share_structure
from lockstep.models.source import SMOLLM2, model_folder
from lockstep.planner import needs
from lockstep.planner.choices import PLAIN, RolloutNumbers, choose_rollout
from lockstep.utils.device import free_device_memory
from lockstep.utils.garbage import frozen_objects
from lockstep.utils.tokenizer import hf_tokenizer
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
RESPONSE = 320
"""Tokens of the longest answer to a question of GSM8K."""


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(arguments)
    if options.check:
        _check(options)
    rows: list[dict[str, Any]] = []
    with frozen_objects():  # as in training
        for shape in options.shapes:
            prompts = min(options.prompts, 128) if shape == "7b" else options.prompts
            model = _module(shape, options.device, torch.bfloat16 if options.device == "cuda" else torch.float32)
            loads = {shape: gsm8k_like(prompts)} if options.gsm8k_like else {}
            if options.gsm8k:
                loads[f"{shape} GSM8K"] = _gsm8k(options.gsm8k, prompts)
            for name, load in loads.items():
                rows += _measure(name, model, load, max(LONGEST, _longest(load)), options)
            del model
            if options.device == "cuda":
                torch.cuda.empty_cache()
        if options.gsm8k and options.smollm2:
            rows += _measure_smollm2(options)
    print("\n" + _table(rows))
    told = {name: value.name if isinstance(value, Path) else value for name, value in vars(options).items()}
    about = _about(argparse.Namespace(**told))
    file = options.results / f"auto_{options.name or 'gsm8k_like'}_{about['date']}.json"
    file.write_text(json.dumps(about | {"rows": rows}, indent=1) + "\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="*", choices=SHAPES, default=["135m", "0.5b", "1.5b", "7b"])
    parser.add_argument("--prompts", type=int, default=256, help="8 samples each; 7b has 128 at most")
    parser.add_argument("--hand", nargs="+", choices=BY_HAND, default=list(BY_HAND), help="the lines beside auto's")
    parser.add_argument("--gsm8k", type=Path, help="the folder of GSM8K's train.jsonl: on its questions too")
    parser.add_argument("--gsm8k-like", action=argparse.BooleanOptionalAction, default=True, help="the shapes on gsm8k_like")
    parser.add_argument("--smollm2", action=argparse.BooleanOptionalAction, default=True, help="with --gsm8k: SmolLM2 itself")
    parser.add_argument("--check", action=argparse.BooleanOptionalAction, default=True, help="compare the tokens first")
    parser.add_argument("--rounds", type=int, default=5, help="generations of each line")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the result file")
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
        from lockstep.generation.engine import warm_generation

        warm_generation(engine, dataclasses.replace(_sampling(load, {}), max_tokens=2), 8)


def _gsm8k(folder: Path, num_prompts: int) -> Load:
    """Questions of GSM8K, 8 samples each, with responses as long as its answers."""
    tokenizer = hf_tokenizer(SMOLLM2)
    with (folder / "train.jsonl").open() as file:
        tasks = [json.loads(line) for line in itertools.islice(file, num_prompts)]
    asked = [ask(task["question"], INSTRUCTION) for task in tasks]
    texts = [tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) for messages in asked]
    prompts = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    lengths = [len(tokenizer(task["answer"])["input_ids"]) for task in tasks]
    return Load([ids for ids in prompts for _ in range(8)], [length for length in lengths for _ in range(8)])


def _longest(load: Load) -> int:
    return max(len(ids) + length for ids, length in zip(load.prompts, load.lengths, strict=True))


def _measure_smollm2(options: argparse.Namespace) -> list[dict[str, Any]]:
    questions = _gsm8k(options.gsm8k, options.prompts)
    load = Load(questions.prompts, [RESPONSE] * len(questions.prompts))
    dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
    model = AutoModelForCausalLM.from_pretrained(model_folder(SMOLLM2), dtype=dtype).to(options.device).eval()
    stop = (hf_tokenizer(SMOLLM2).eos_token_id,)
    rows = _measure("smollm2 GSM8K", model, load, _longest(load), options, stop)
    return rows + _measure("smollm2", model, gsm8k_like(options.prompts), LONGEST, options)


def _measure(
    shape: str, model: PreTrainedModel, load: Load, longest: int, options: argparse.Namespace, stop: tuple[int, ...] = ()
) -> list[dict[str, Any]]:
    lines = {"auto": _chosen(model, len(load.lengths), longest)} | {name: BY_HAND[name] for name in options.hand}
    keys = {name: _key(numbers, len(load.lengths)) for name, numbers in lines.items()}
    engines = {key: _engine(model, lines[name]) for name, key in reversed(keys.items())}  # what comes to the same is measured once
    sampling = dataclasses.replace(_sampling(load, {}), stop_token_ids=stop)
    warm = {}
    for key, engine in engines.items():
        start = time.perf_counter()
        _warm_up(engine, load)
        warm[key] = time.perf_counter() - start
    timed: dict[Any, list[tuple[float, int]]] = {key: [] for key in engines}
    for _ in range(options.rounds):
        for key, engine in engines.items():
            timed[key].append(_generate(engine, load, sampling))
        print(shape, {name: [round(seconds, 3) for seconds, _ in timed[key]] for name, key in keys.items()}, flush=True)
    rows = [_row(shape, name, lines[name], len(load.lengths), warm[key], timed[key]) for name, key in keys.items()]
    print(*rows, sep="\n", flush=True)
    return rows


def _key(numbers: RolloutNumbers, rows: int) -> tuple[int, int, bool]:
    return min(numbers.max_num_seqs, rows), numbers.max_num_batched_tokens, numbers.gpu_memory_utilization >= 0.8


def _generate(engine: Any, load: Load, sampling: SamplingParams) -> tuple[float, int]:
    """Seconds and tokens of one generation."""
    gc.collect()
    gc.freeze()  # as in training, where what is there before the first step is left out of collections
    start = time.perf_counter()
    tokens = sum(len(completion.ids) for completion in engine.generate(_requests(load), sampling))
    engine.sleep()
    return time.perf_counter() - start, tokens


def _row(shape: str, line: str, numbers: RolloutNumbers, rows: int, warm: float, timed: list[tuple[float, int]]) -> dict[str, Any]:
    return {"shape": shape, "line": line, **dataclasses.asdict(numbers), "rows": rows, "warm_up_s": round(warm, 2),
            "seconds": round(statistics.median(s for s, _ in timed), 3), "all_seconds": [round(s, 3) for s, _ in timed],
            "tokens": timed[-1][1], "tokens_per_s": round(statistics.median(count / s for s, count in timed))}  # fmt: skip


def _chosen(model: PreTrainedModel, rows: int, longest: int) -> RolloutNumbers:
    """What the plan chooses for this load on what is free now."""
    free = free_device_memory(model.device)
    if free is None:
        return PLAIN
    with tempfile.TemporaryDirectory() as folder:
        model.config.save_pretrained(folder)
        rollout = needs.count_rollout(
            RolloutConfig(), ModelConfig(path=folder), actor=None, world_size=1, element=2, load=needs.Load(longest, rows, rows)
        )
    return choose_rollout(rollout, needs.Load(longest, rows, rows), free)


def _table(rows: Sequence[dict[str, Any]]) -> str:
    lines = [
        f"{'shape':14}{'numbers':16}{'seats':>6}{'pass':>7}{'share':>7}{'warm-up s':>10}{'s':>8}{'tokens/s':>10}{'of best':>9}"
    ]
    for row in rows:
        best = max(other["tokens_per_s"] for other in rows if other["shape"] == row["shape"])
        lines.append(
            f"{row['shape']:14}{row['line']:16}{row['max_num_seqs']:>6}{row['max_num_batched_tokens']:>7}{row['gpu_memory_utilization']:>7}"
            f"{row['warm_up_s']:>10}{row['seconds']:>8}{row['tokens_per_s']:>10}{row['tokens_per_s'] / best:>9.1%}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
