"""Counted randomness: the number behind a token is a function of its key, not of what was drawn before.

So the same logits give the same token in a batch of 1 or 1,000, in any order, on any number of workers, before or after a restart.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed 64-bit number
_MIX_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX_2 = -7723592293110705685  # 0x94D049BB133111EB
_BITS = (1 << 64) - 1


def request_keys(seed: int, keys: Sequence[tuple[int, int, int]]) -> Tensor:
    """[rows] int64: `request_key` of each."""
    return torch.tensor([request_key(seed, key) for key in keys], dtype=torch.int64)


def request_key(seed: int, key: tuple[int, int, int]) -> int:
    """One signed 64-bit number for (step, prompt, sample) under this seed. In plain numbers: a tensor costs more than one request's sum."""
    state = seed
    for part in (*key, 0):
        state = state + _GOLDEN & _BITS
        state = (state ^ state >> 30) * _MIX_1 & _BITS
        state = (state ^ state >> 27) * _MIX_2 & _BITS
        state = (state ^ state >> 31) ^ part & _BITS
    return state - (state >> 63 << 64)


def uniforms(request_keys: Tensor, positions: Tensor) -> Tensor:
    """[rows] float32 in [0, 1): the random number of the token at `positions` [rows] of each request."""
    bits = _mix(_mix(request_keys + _GOLDEN) ^ positions)
    return ((bits >> 40) & 0xFFFFFF).to(torch.float32) / float(1 << 24)


def _mix(x: Tensor) -> Tensor:
    """The finaliser of SplitMix64 (Steele, Lea, Flood 2014) in wrapping 64-bit arithmetic."""
    x = (x ^ _shift(x, 30)) * _MIX_1
    x = (x ^ _shift(x, 27)) * _MIX_2
    return x ^ _shift(x, 31)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Right shift that fills with zeros; torch's fills with the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
