"""Attention of training by the three ways that it has on a GPU, as rates: forward, and backward as two and a half times its work.

    python -m benchmarks.attention
    python -m benchmarks.attention --shapes 0.5b --lengths 16384

32,768 tokens of rows of one length, or 8 responses to a prompt where a length is written P+R; causal, bfloat16. `segments` are the kernels
of kernels/segment_attention.py, `packed` is torch's flash attention with a pass for the prompts, `alone` is cuDNN's over a row at a
time. One table, and benchmarks/results/attention_*.json.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.step import RESULTS, _about
from benchmarks.workload import SHAPES
from lockstep.kernels import flash, segment_attention
from lockstep.models.attention import PackedLayout

TOKENS = 32_768
LENGTHS = ["120+250", "218+512", "1024", "2048", "4096", "8192", "16384", "32768"]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["1.5b", "0.5b", "135m"])
    parser.add_argument("--lengths", nargs="+", default=LENGTHS)
    parser.add_argument("--ways", nargs="+", default=["segments", "packed", "alone"])
    parser.add_argument("--calls", type=int, default=4)
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args(arguments)
    rows = [row for shape in options.shapes for length in options.lengths for row in _measure(shape, length, options)]
    about = _about(options)
    (RESULTS / f"attention_{about['date']}.json").write_text(json.dumps(about | {"rows": rows}, indent=1) + "\n")


def _measure(shape: str, length: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    lengths, followers = _rows(length)
    layout = PackedLayout(torch.tensor(lengths), options.device, followers)
    heads, keys = (SHAPES[shape][name] for name in ("num_attention_heads", "num_key_value_heads"))
    size = SHAPES[shape]["hidden_size"] // heads
    torch.manual_seed(0)
    drawn = (torch.randn(layout.num_tokens, h, size, device=options.device).bfloat16() for h in (heads, keys, keys, heads))
    query, key, value, grad = drawn
    leaves = [x.requires_grad_() for x in (query, key, value)]
    work = 4e-9 * heads * size * _pairs(length)  # of a forward pass, in units of a TFLOP/s times a ms
    found = []
    for way in options.ways:
        attend = _way(way, layout, leaves)
        if attend is None:
            continue
        forward = _milliseconds(attend, options.calls)
        out = attend()
        backward = _milliseconds(lambda out=out: torch.autograd.grad(out, leaves, grad, retain_graph=True), options.calls)
        rates = {"forward": round(work / forward), "backward": round(2.5 * work / backward)}
        found.append({"shape": shape, "length": length, "way": way, **rates})
        print("  ".join(f"{name} {value}" for name, value in found[-1].items()), flush=True)
    return found


def _rows(length: str) -> tuple[list[int], list[int]]:
    prompt, *response = map(int, length.split("+"))
    if not response:
        return [prompt] * max(1, TOKENS // prompt), []
    groups = TOKENS // (prompt + 8 * response[0])
    return [prompt] * groups + response * (8 * groups), [8] * groups


def _pairs(length: str) -> float:
    lengths, followers = _rows(length)
    return sum(n * n / 2 for n in lengths) + sum(followers) * lengths[0] * lengths[-1]


def _way(way: str, layout: PackedLayout, leaves: Sequence[Tensor]) -> Callable[[], Tensor] | None:
    if way == "segments":
        return lambda: segment_attention.attend(*leaves, layout.flash.segments, None)
    runs = flash.cut_runs(layout.lengths.tolist(), layout.device, 0 if way == "alone" else layout.num_tokens)
    if way == "alone" and (layout.shared is not None or layout.own.longest_query < 1024):
        return None
    return lambda: flash.attend(*leaves, runs, layout.shared, layout.num_shared_tokens, None)


def _milliseconds(call: Callable[[], Any], calls: int) -> float:
    call()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(calls):
        call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / calls


if __name__ == "__main__":
    main()
