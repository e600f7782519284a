"""Where a generation on a CPU spends its processor time: every C function of the native engine, prefill apart from decoding.

    python -m benchmarks.rollout_cpu_parts --model smollm2-135m --requests 32

First what Python takes, and single decode steps; then a generation whose layers are called function by function from Python, which costs
some time; the last line is of one that runs as it always does. Processor time, of one thread unless told otherwise: it says something on a
busy machine too.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter, defaultdict
from typing import Any

import torch
from torch import Tensor

from benchmarks.one_by_one import OneByOne
from benchmarks.rollout_cpu import Load, mixed
from lockstep.config.actor_rollout_ref import RolloutConfig
from lockstep.config.engine import ModelConfig
from lockstep.config.sampling import SamplingParams
from lockstep.generation.cpu import fused_backend, passes
from lockstep.generation.cpu.kernels import Library, draw
from lockstep.generation.cpu.paged_attention import StepBatch
from lockstep.models.attention import CACHED
from lockstep.models.load import Head, load_model, share_structure
from lockstep.workers.rollout.registry import make_rollout
from lockstep.workers.rollout.request import Request


class Clock:
    """Seconds of each function and phase, while it is switched on."""

    def __init__(self) -> None:
        self.seconds: dict[tuple[str, str], float] = defaultdict(float)
        self.flops: Counter[tuple[str, str]] = Counter()
        self.phase = ""
        self._call, self._step = Library.call, passes.PassBackend.step

    def start(self) -> None:
        """Functions are called one by one and timed from now on."""

        def call(library: Library, name: str, *arguments: Any) -> None:
            start = time.process_time()
            self._call(library, name, *arguments)
            part = (self.phase, name)
            if name == "linear":
                rows, depth, columns, mode = arguments[6], arguments[7], arguments[8], arguments[10]
                part = (self.phase, f"linear {depth} -> {columns}")
                self.flops[part] += 2 * rows * depth * columns * (2 if mode == 2 else 1)
            self.seconds[part] += time.process_time() - start

        def step(backend: passes.PassBackend, batch: StepBatch, sampling: SamplingParams) -> tuple[Tensor, Tensor]:
            self.phase = "prefill" if max(batch.query_lens) > 1 else "decode"
            return self._step(backend, batch, sampling)

        Library.call, passes.PassBackend.step, fused_backend.WholePass = call, step, OneByOne  # type: ignore[method-assign, assignment, misc]

    def show(self) -> None:
        """The parts, the longest first."""
        for part, seconds in sorted(self.seconds.items(), key=lambda item: (item[0][0], -item[1])):
            rate = f"{self.flops[part] / seconds / 1e9:7.1f} GFLOP/s" if self.flops[part] else ""
            print(f"{part[0]:8s} {part[1]:24s} {seconds:7.3f} s {rate}")


def generate(engine: Any, load: Load) -> float:
    """Processor seconds of one generation."""
    requests = [Request(torch.tensor(p), (0, i, 0), max_tokens=n) for i, (p, n) in enumerate(zip(*load, strict=True))]
    start = time.process_time()
    engine.generate(requests, SamplingParams(temperature=1.0, max_tokens=max(load[1]), stop_token_ids=(), seed=0))
    return time.process_time() - start


def show_python(engine: Any, load: Load) -> None:
    """What one generation spends outside the C functions, a pass."""
    call, step, inside, passed = Library.call, passes.PassBackend.step, 0.0, 0

    def timed(library: Library, name: str, *arguments: Any) -> None:
        nonlocal inside
        start = time.process_time()
        call(library, name, *arguments)
        inside += time.process_time() - start

    def counted(backend: passes.PassBackend, *arguments: Any) -> tuple[Tensor, Tensor]:
        nonlocal passed
        passed += 1
        return step(backend, *arguments)

    Library.call, passes.PassBackend.step = timed, counted  # type: ignore[method-assign]
    whole = generate(engine, load)
    Library.call, passes.PassBackend.step = call, step  # type: ignore[method-assign]
    print(f"outside the C functions {(whole - inside) / passed * 1e3:.2f} ms a pass, {passed} passes")


@torch.no_grad()
def show_steps(backend: Any, context: int = 150) -> None:
    """Milliseconds of a decode step, the best of some, by the number of rows; each has `context` tokens behind it."""
    pages, rows = context // 16 + 1, (1, 2, 4, 8, 12, 13, 16, 24, 32, 48, 64, 128)
    backend.open(1 + pages * max(rows))
    with backend.ready():
        for count in rows:
            table = torch.arange(1, count * pages + 1, dtype=torch.int32).view(count, pages)
            places = torch.full((count,), context)
            slots = table[:, context // 16].long() * 16 + context % 16
            drawn = torch.arange(count)
            batch = StepBatch(torch.arange(100, 100 + count), places, slots, [1] * count, places.int(), table, drawn)
            best = float("inf")
            for _ in range(max(3, 100 // count)):
                start = time.perf_counter()
                draw(fused_backend.library(), backend.forward(batch, drawn), torch.full((count,), 0.5), 1.0)  # type: ignore[arg-type]
                best = min(best, time.perf_counter() - start)
            print(f"step of {count:4d} rows {best * 1e3:8.2f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--requests", type=int, default=32)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    dtype = getattr(torch, arguments.dtype)
    model = load_model(ModelConfig(path=arguments.model), Head.LANGUAGE_MODEL, seed=0).eval().to(dtype)
    engine: Any = make_rollout(share_structure(model, CACHED).to(dtype), RolloutConfig(max_num_seqs=arguments.requests), 0)
    assert isinstance(engine.backend, fused_backend.FusedBackend), "this model does not run on the C functions here"
    load, tokens = mixed(arguments.requests), sum(mixed(arguments.requests)[1])
    whole = min(generate(engine, load) for _ in range(2))
    show_python(engine, load)
    show_steps(engine.backend)
    clock = Clock()
    clock.start()
    generate(engine, load)
    clock.show()
    print(f"in one call: {whole:.2f} s of {tokens} tokens, {tokens / whole:.1f} a CPU second")


if __name__ == "__main__":
    main()
