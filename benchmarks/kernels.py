"""Where the GPU's time goes: the kernels that torch.profiler saw, by kind."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

KINDS = {
    "attention": ("flash", "fmha", "sdpa", "attention", "_join", "forward", "query_gradient", "key_gradient"),
    "products": ("gemm", "nvjet", "cutlass", "xmma", "splitk", "cublas"),
    "gate": ("_gate",),
    "norms": ("_normalise",),
    "rotary": ("_rotate",),
    "head": ("_statistics", "_logit_gradient"),
    "optimizer": ("adam", "lpnorm", "multi_tensor"),
    "copies": ("copy", "memcpy", "memset", "fill", "direct_copy"),
}
"""Parts of the names of kernels, in lower case, by what they do; the first that fits counts."""


def kind_of(name: str) -> str:
    """What a kernel of this name does."""
    return next((kind for kind, parts in KINDS.items() if any(part in name.lower() for part in parts)), "other")


def profiled(call: Callable[[], Any], longest: int = 25) -> dict[str, Any]:
    """One call under the profiler: the milliseconds of each kind of kernel, of those `longest` that take most, and the share of the time
    in which no kernel ran. Kernels of several streams count together, so that the share may come out too small."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        started = time.perf_counter()
        call()
        torch.cuda.synchronize()
        seconds = time.perf_counter() - started
    kernels = sorted(((e.key, e.self_device_time_total / 1e3, e.count) for e in found.key_averages()), key=lambda k: -k[1])
    busy = sum(ms for _, ms, _ in kernels)
    kinds = dict.fromkeys((*KINDS, "other"), 0.0)
    for name, ms, _ in kernels:
        kinds[kind_of(name)] += ms
    return {
        "profiled_s": round(seconds, 4),
        "idle_share": round(max(0.0, 1 - busy / (seconds * 1e3)), 4),
        "kind_ms": {kind: round(ms, 2) for kind, ms in kinds.items()},
        "kernel_ms": {f"{name[:90]} x {count}": round(ms, 2) for name, ms, count in kernels[:longest]},
    }
