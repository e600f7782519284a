"""verl's small helpers that recipes import: devices, padding, log-probs of whole logits, and profilers, which are not here."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from omegaconf import OmegaConf
from torch import Tensor

is_cuda_available, is_npu_available = torch.cuda.is_available(), False
PPO_RAY_RUNTIME_ENV: dict[str, Any] = {}
"""Workers start with the environment that they need."""


def get_device_name() -> str:
    """The kind of device that a run uses here."""
    return "cuda" if is_cuda_available else "cpu"


def get_torch_device() -> Any:
    """torch.cuda or torch.cpu."""
    return getattr(torch, get_device_name())


def get_device_id() -> int:
    """The number of this process's device; 0 on a CPU."""
    return torch.cuda.current_device() if is_cuda_available else 0


def get_nccl_backend() -> str:
    """What processes on these devices talk through."""
    return "nccl" if is_cuda_available else "gloo"


def compute_position_id_with_mask(mask: Tensor) -> Tensor:
    """Positions that count from 0 at the first token of each row."""
    return (mask.cumsum(-1) - 1).clamp(min=0)


def get_response_mask(response_id: Tensor, eos_token: int | Sequence[int] = 2, dtype: torch.dtype = torch.int64) -> Tensor:
    """1 up to the first end token of each row, that included."""
    ends = torch.isin(response_id, torch.as_tensor(eos_token, device=response_id.device)).long()
    return (ends.cumsum(-1) - ends == 0).to(dtype)


def pad_sequence_to_length(tensors: Tensor, max_seq_len: int, pad_token_id: float, left_pad: bool = False) -> Tensor:
    """The last dimension filled up to `max_seq_len`; longer tensors stay as they are."""
    missing = max(0, max_seq_len - tensors.shape[-1])
    return torch.nn.functional.pad(tensors, (missing, 0) if left_pad else (0, missing), value=pad_token_id)


def pad_2d_list_to_length(response: Sequence[Sequence[int]], pad_token_id: int, max_length: int | None = None) -> Tensor:
    """Lists as the rows of one tensor, filled up on the right to the longest, or to `max_length` where that is longer."""
    width = max([max_length or 0, *map(len, response)])
    return torch.tensor([[*row, *[pad_token_id] * (width - len(row))] for row in response])


def logprobs_from_logits(logits: Tensor, labels: Tensor, inplace_backward: bool = True) -> Tensor:
    """The log-probs of `labels` under logits [..., V]."""
    return torch.log_softmax(logits, dim=-1).gather(-1, labels[..., None]).squeeze(-1)


def import_external_libs(external_libs: str | Sequence[str] | None = None) -> None:
    """Import these modules."""
    for name in [external_libs] if isinstance(external_libs, str) else external_libs or []:
        importlib.import_module(name)


def deprecated(replacement: str = "") -> Callable[[Any], Any]:
    """A decorator that warns once, and changes nothing."""

    def decorate(decorated: Any) -> Any:
        warnings.warn(f"{decorated.__qualname__} is deprecated{f'; use {replacement}' if replacement else ''}", FutureWarning, 2)
        return decorated

    return decorate


def convert_to_regular_types(obj: Any) -> Any:
    """OmegaConf's containers, at any depth, as dicts and lists."""
    if OmegaConf.is_config(obj):
        return OmegaConf.to_container(obj, resolve=True)
    if isinstance(obj, dict):
        return {key: convert_to_regular_types(value) for key, value in obj.items()}
    return [convert_to_regular_types(value) for value in obj] if isinstance(obj, list | tuple) else obj


def union_two_dict(dict1: dict[Any, Any], dict2: dict[Any, Any]) -> dict[Any, Any]:
    """`dict1` with the entries of `dict2` added, in place. Raises ValueError where they differ."""
    differ = [key for key in dict2 if key in dict1 and dict1[key] != dict2[key]]
    if differ:
        raise ValueError(f"both have {differ}, with different values")
    dict1 |= dict2
    return dict1


def nothing(*args: Any, **kwargs: Any) -> None:
    """None: a processor of images, a choice of devices, which is made at the start, a profiler; each step logs timing_s/* and perf/*."""


class NoProfiler:
    """verl's profilers and memory loggers as decorators and bases that do nothing."""

    __init__ = log = start = stop = nothing

    def __call__(self, decorated: Any) -> Any:
        return decorated

    @classmethod
    def annotate(cls, *args: Any, **kwargs: Any) -> NoProfiler:
        """A decorator that does nothing."""
        return cls()
