"""Flash attention over rows of many thousand tokens, one at a time, by cuDNN: there it takes half the time of the kernel for packed rows.

cuDNN makes a plan for each length that it meets, so a row is filled up to one of a few lengths. What fills it up comes after the row: the
causal mask hides it, and its gradient is 0. Legend: L tokens, H query heads, K key-value heads, D head size.
"""

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

LEAST = {64: 8192, 128: 4096}
"""By head size; shorter rows are packed."""
_STEPS = 32
"""Lengths between a power of 2 and the next."""


def applies(query: Tensor) -> bool:
    """Whether rows of these heads [..., D] go through cuDNN: on a Hopper GPU or a later one, and not where torch is told to use only
    kernels that give the same bits twice."""
    return query.shape[-1] in LEAST and _has_kernels(query.device) and not torch.are_deterministic_algorithms_enabled()


@functools.cache
def _has_kernels(device: torch.device) -> bool:
    return device.type == "cuda" and torch.backends.cudnn.is_available() and torch.cuda.get_device_capability(device) >= (9, 0)


def filled_length(length: int) -> int:
    """The length that a row of `length` tokens is filled up to: at most a thirty-second more."""
    step = max(1, 2 ** (length.bit_length() - 1) // _STEPS)
    return -(-length // step) * step


def forward(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> tuple[Tensor, Tensor]:
    """Causal attention of one row: output [L, H, D] and log-sum-exp of the scores [H, L], from query [L, H, D], key and value [L, K, D]."""
    length = len(query)
    q, k, v = (_filled(x) for x in (query, key, value))
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, 0.0, True, False, scale=_scale(query, scale)
    )
    return out[0].transpose(0, 1)[:length], lse.view(q.shape[1], -1)[:, :length]


def backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, scale: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and value, given `out`, `lse` and the gradient of `out`."""
    length = len(query)
    g, q, k, v, o = (_filled(x) for x in (grad, query, key, value, out))
    statistics = F.pad(lse, (0, q.shape[2] - length)).contiguous()[None, :, :, None]
    seed, offset = torch.zeros(2, dtype=torch.int64, device=query.device).unbind()  # of a dropout that there is none of
    found = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        g, q, k, v, o, statistics, seed, offset, None, None, None, q.shape[2], q.shape[2], 0.0, True, scale=_scale(query, scale)
    )
    dq, dk, dv = (x[0].transpose(0, 1)[:length] for x in found)
    return dq, dk, dv


def _filled(x: Tensor) -> Tensor:
    """[L, H, D] as [1, H, filled length, D], with zeros at the end."""
    more = filled_length(len(x)) - len(x)
    return (F.pad(x, (0, 0, 0, 0, 0, more)) if more else x)[None].transpose(1, 2)


def _scale(query: Tensor, scale: float | None) -> float:
    return query.shape[-1] ** -0.5 if scale is None else scale
