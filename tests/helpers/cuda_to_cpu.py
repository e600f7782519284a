"""Lets libraries that are written for CUDA run on CPU tensors with gloo. For tests; it changes torch for the rest of the process.

megatron-core asks for `torch.cuda.current_device()`, makes tensors on "cuda", compares `tensor.type()` with CUDA's names, and keeps CUDA
generators and streams. Here the device is the CPU, streams do nothing, and the generator is torch's own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_CPU = torch.device("cpu")
_installed = False


def install() -> None:
    """Call it in a process before the library is used; more calls change nothing."""
    global _installed
    if _installed:
        return
    _installed = True
    cuda: Any = torch.cuda
    cuda.current_device = lambda: _CPU
    for name in ("set_device", "synchronize", "empty_cache", "reset_peak_memory_stats"):
        setattr(cuda, name, _nothing)
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"):
        setattr(cuda, name, lambda *args, **options: 0)
    cuda.get_rng_state = cuda.random.get_rng_state = lambda *args, **options: torch.get_rng_state()
    cuda.set_rng_state = cuda.random.set_rng_state = lambda state, *args, **options: torch.set_rng_state(state)
    cuda.manual_seed = lambda seed: torch.default_generator.manual_seed(int(seed))  # manual_seed_all is called by torch itself
    cuda.default_generators = (torch.default_generator,)
    cuda.Stream = cuda.Event = _Idle
    cuda.current_stream = cuda.default_stream = _Idle
    cuda.stream = lambda stream: contextlib.nullcontext()
    cuda.nvtx.range_push = cuda.nvtx.range_pop = _nothing
    cuda.get_device_capability = lambda *args: (0, 0)
    _replace_generators()
    _CudaMeansCpu().__enter__()


def _replace_generators() -> None:
    from megatron.core.tensor_parallel import random

    random._get_cuda_rng_state = lambda *args, **options: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *args, **options: torch.set_rng_state(state)


class _CudaMeansCpu(TorchFunctionMode):
    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.Tensor.cuda, torch.Tensor.pin_memory):
            return args[0]
        kwargs = {name: _on_cpu(value) for name, value in (kwargs or {}).items()}
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        if func is torch.Tensor.to:
            args = tuple(_on_cpu(arg) for arg in args)
        out = func(*args, **kwargs)
        if func is torch.Tensor.type and isinstance(out, str):
            return out.replace("torch.", "torch.cuda.", 1)
        return out


def _on_cpu(value: Any) -> Any:
    is_cuda = value.type == "cuda" if isinstance(value, torch.device) else isinstance(value, str) and value.startswith("cuda")
    return _CPU if is_cuda else value


def _nothing(*args: Any, **options: Any) -> None:
    pass


class _Idle:
    """A stream or an event: whatever is asked of it is done already."""

    def __init__(self, *args: Any, **options: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., None]:
        return _nothing
