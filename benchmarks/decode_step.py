"""One decode step on a GPU: how long the captured step takes, and which kernels it is made of.

    python -m benchmarks.decode_step --step 0.5b,32,512 1.5b,32,512 1.5b,16,3500 --kernels
    python -m benchmarks.decode_step --step 0.5b,32,16000 0.5b,32,32000 --kv-cache-dtype auto fp8 --repeats 3

A step is SHAPE,ROWS,CONTEXT: random weights of that shape, every row with its own pages and that many tokens in them; each is measured
with keys and values of every type of --kv-cache-dtype. The time is the
median of --repeats times 10 replays of the graph, one after another. --kernels adds the kernels of a step, by torch.profiler. One table is
printed, and benchmarks/results/decode_step_*.json written.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Sequence
from statistics import median
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.rollout import RESULTS, _about, _model, _parser
from lockstep.generation.gpu.backend import CACHES
from lockstep.generation.gpu.draw import num_chunks
from lockstep.generation.gpu.fused import FusedDecoder, fuse_projections
from lockstep.generation.gpu.rows import RUNNING, RowState
from lockstep.generation.gpu.runner import DecodeRunner
from lockstep.generation.pages import CacheShape

PAGE_SIZE = 64
_REPLAYS = 10


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--step", nargs="+", default=["0.5b,32,512", "1.5b,32,512", "1.5b,16,3500"], metavar="SHAPE,ROWS,CONTEXT")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--kernels", action="store_true")
    parser.add_argument("--kv-cache-dtype", nargs="+", choices=("auto", "fp8"), default=["auto"])
    parser.add_argument("--out", default=RESULTS, help="folder of the result file")
    options = parser.parse_args(arguments)
    steps = []
    for step, kept in itertools.product(options.step, options.kv_cache_dtype):
        shape, rows, context = step.split(",")
        steps.append(measure(shape, int(rows), int(context), kept, options.repeats, options.kernels))
        print(_line(steps[-1]), flush=True)
    about = _about(_parser().parse_args([]), torch.device("cuda"), torch.bfloat16) | {"arguments": vars(options) | {"out": ""}}
    file = f"{options.out}/decode_step_{about['date']}.json"
    with open(file, "w") as out:
        out.write(json.dumps(about | {"steps": steps}, indent=1) + "\n")


@torch.no_grad()
def measure(shape: str, rows: int, context: int, kept: str, repeats: int, kernels: bool) -> dict[str, Any]:
    """Milliseconds of a step with keys and values of type `kept`, and with `kernels` [milliseconds, times, name] of each kind."""
    graph = _captured(shape, rows, context, kept, (1 + repeats) * _REPLAYS)
    made: dict[str, Any] = {"shape": shape, "rows": rows, "context": context, "kv_cache_dtype": kept}
    made["ms"] = round(_time(graph, repeats), 4)
    if kernels:
        with profile(activities=[ProfilerActivity.CUDA]) as found:
            graph.replay()
            torch.cuda.synchronize()
        spent = sorted(found.key_averages(), key=lambda one: -one.device_time_total)
        made["kernels"] = [
            [round(one.device_time_total / 1000, 4), one.count, one.key[:80]] for one in spent if one.device_time_total
        ]
    return made


def _captured(shape: str, rows: int, context: int, kept: str, steps: int) -> torch.cuda.CUDAGraph:
    device = torch.device("cuda")
    model = _model(_parser().parse_args(["--shape", shape]), device, torch.bfloat16)
    fuse_projections(model)
    config = model.config
    width = (context + steps + 8) // PAGE_SIZE + 1
    dim = config.hidden_size // config.num_attention_heads
    layers, heads = config.num_hidden_layers, config.num_key_value_heads
    shape_of = CacheShape(layers, heads, dim, PAGE_SIZE, model.dtype, kept)
    cache = CACHES[kept](shape_of, rows * width + 1, device)
    if cache.scales is None:
        cache.pool.normal_()
    else:  # positive numbers from 2^-9 to 240, and scales that make them keys and values of about 1
        cache.pool.view(torch.uint8).random_(0, 120)
        cache.scales.fill_(2.0**-7)
    state = RowState.make(rows, width, config.vocab_size, num_chunks(config.vocab_size), device)
    state.page_table[:rows] = 1 + torch.arange(rows * width, device=device).view(rows, width)
    state.context[:rows], state.limit[:rows], state.done[:rows] = context, 1 << 30, RUNNING
    state.key[:rows] = torch.arange(rows, device=device)
    runner = DecodeRunner(FusedDecoder(model, cache, width * PAGE_SIZE), state, PAGE_SIZE, set())
    kind = (rows, None, False, False, False)
    runner.steps(rows, 1, None, False)
    return runner._graphs[kind]


def _time(graph: torch.cuda.CUDAGraph, repeats: int) -> float:
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(_REPLAYS):
            graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / _REPLAYS)
    return median(times)


def _line(step: dict[str, Any]) -> str:
    lines = [
        f"{step['shape']}, {step['rows']} rows of {step['context']} tokens, keys {step['kv_cache_dtype']}: {step['ms']:.3f} ms"
    ]
    lines += [f"  {ms:8.3f} ms {count:4} times  {name}" for ms, count, name in step.get("kernels", [])[:12]]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
