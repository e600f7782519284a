"""Generation on a CPU: native against transformers' generate and, where it is installed, vLLM; same weights, prompts and response lengths.

    python benchmarks/rollout_cpu.py --model smollm2-135m --threads 2

In the environment that `make test-vllm` makes (.venv-vllm) this compares all three.

Every engine is run `--repeats` times, in turn, so that a machine that is busy with something else is busy for all of them; tokens a
CPU second (all threads' time together) say more than tokens a second on such a machine. A response's length is forced: no stop tokens, and
a limit for each request. Useful tokens are the sum of these lengths.
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

from lockstep.config.actor_rollout_ref import RolloutConfig
from lockstep.config.engine import ModelConfig
from lockstep.config.sampling import SamplingParams
from lockstep.errors import ConfigError
from lockstep.models.cached_attention import CACHED
from lockstep.models.load import Head, load_model, share_structure
from lockstep.workers.rollout.base import Request, RolloutEngine
from lockstep.workers.rollout.registry import check_installed, make_rollout
from lockstep.workers.rollout.vllm.engine import VLLMRollout

Load = tuple[list[list[int]], list[int]]
"""Prompts (token ids), and the length of each response."""


def mixed(num_prompts: int = 64, seed: int = 0, vocabulary: int = 40_000) -> Load:
    """Prompts of 57 to 137 tokens; response lengths lognormal, mean about 84, at most 192."""
    rng = random.Random(seed)
    prompts = [[rng.randrange(100, vocabulary) for _ in range(rng.randint(57, 137))] for _ in range(num_prompts)]
    lengths = [max(8, min(192, int(rng.lognormvariate(4.3, 0.55)))) for _ in prompts]
    lengths[rng.randrange(num_prompts)] = 192
    return prompts, lengths


def grouped(num_prompts: int = 8, n: int = 8, seed: int = 1) -> Load:
    """The same with n samples per prompt."""
    prompts, lengths = mixed(num_prompts * n, seed)
    return [prompts[i // n * n] for i in range(len(prompts))], lengths


LOADS: dict[str, Callable[..., Load]] = {"mixed": mixed, "grouped": grouped}


@dataclass(frozen=True)
class Run:
    """Generates the load once, and says how much processor time was used so far."""

    generate: Callable[[], int]
    """Returns the number of tokens."""
    cpu_s: Callable[[], float] = time.process_time


def native_engine(model: transformers.PreTrainedModel, load: Load, **config: object) -> Run:
    """The native engine, log-probs included."""
    dtype = next(model.parameters()).dtype
    section = RolloutConfig(max_num_seqs=len(load[0]), **config)  # type: ignore[arg-type]
    return Run(_generation(make_rollout(share_structure(model, CACHED).to(dtype), section, 0), load))


def vllm_engine(path: str, dtype: torch.dtype, load: Load, eager: bool) -> Run:
    """vLLM, log-probs included, in its own process."""
    section = RolloutConfig(name="vllm", max_num_seqs=len(load[0]), enforce_eager=eager)
    engine = VLLMRollout(ModelConfig(path=path), section, 0, torch.device("cpu"), dtype)
    process = psutil.Process(engine.process.pid)
    return Run(_generation(engine, load), lambda: time.process_time() + sum(process.cpu_times()[:2]))


def _generation(engine: RolloutEngine, load: Load) -> Callable[[], int]:
    requests = [Request(torch.tensor(p), (0, i, 0), max_tokens=n) for i, (p, n) in enumerate(zip(*load, strict=True))]
    sampling = SamplingParams(temperature=1.0, max_tokens=max(load[1]), stop_token_ids=(), seed=0)
    return lambda: sum(len(completion.ids) for completion in engine.generate(requests, sampling))


def transformers_engine(model: transformers.PreTrainedModel, load: Load) -> Run:
    """transformers: one batch, padded on the left, as long as its longest response."""
    plain = share_structure(model, "sdpa")
    plain.generation_config = transformers.GenerationConfig()
    width = max(map(len, load[0]))
    ids = torch.tensor([[0] * (width - len(p)) + p for p in load[0]])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in load[0]])

    @torch.no_grad()
    def run() -> int:
        longest = max(load[1])
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--load", choices=LOADS, default="mixed")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--engines", default=installed(), help="of native, native_invariant, transformers, vllm, vllm_eager")
    parser.add_argument("--requests", type=int, help="requests of the load, instead of its own number")
    parser.add_argument("--out", type=Path, help="write the numbers to this JSON file")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    model = load_model(ModelConfig(path=arguments.model), Head.LANGUAGE_MODEL, seed=0).eval().to(getattr(torch, arguments.dtype))
    os.environ["OMP_NUM_THREADS"] = str(arguments.threads)  # vLLM's process reads it
    load = LOADS[arguments.load](**{"num_prompts": arguments.requests} if arguments.requests else {})
    engines = {
        "native": lambda: native_engine(model, load),
        "native_invariant": lambda: native_engine(model, load, batch_invariant=True),
        "transformers": lambda: transformers_engine(model, load),
        "vllm": lambda: vllm_engine(arguments.model, getattr(torch, arguments.dtype), load, eager=False),
        "vllm_eager": lambda: vllm_engine(arguments.model, getattr(torch, arguments.dtype), load, eager=True),
    }
    runs = {name: engines[name]() for name in arguments.engines.split(",")}
    rates: dict[str, list[float]] = {name: [] for name in runs}
    cpu_rates: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(arguments.repeats):
        for name, run in runs.items():
            start, cpu = time.perf_counter(), run.cpu_s()
            tokens = run.generate()
            rates[name].append(tokens / (time.perf_counter() - start))
            cpu_rates[name].append(tokens / (run.cpu_s() - cpu))
    print(
        f"{arguments.model}, {arguments.dtype}, {arguments.threads} threads, load {arguments.load}: {len(load[0])} requests,",
        end=" ",
    )
    print(f"{sum(map(len, load[0]))} prompt tokens, {sum(load[1])} response tokens (longest {max(load[1])})")
    for name, values in rates.items():
        every = ", ".join(f"{value:.1f}" for value in values)
        print(f"{name:18s} {statistics.median(values):8.1f} tok/s ({every}); {statistics.median(cpu_rates[name]):.1f} a CPU second")
    if arguments.out:
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
        about = {"date": time.strftime("%Y-%m-%d"), "machine": platform.processor() or platform.machine(), "commit": commit}
        about |= {"torch": torch.__version__, "transformers": transformers.__version__, "threads": arguments.threads}
        about |= {
            "model": arguments.model,
            "dtype": arguments.dtype,
            "load": arguments.load,
            "tokens_per_s": rates,
            "tokens_per_cpu_s": cpu_rates,
        }
        arguments.out.write_text(json.dumps(about, indent=1) + "\n")


if __name__ == "__main__":
    main()
