"""Counted randomness: the number behind a token is a function of its key, not of what was drawn before.

So the same logits give the same token in a batch of 1 or 1,000, in any order, on any number of workers, before or after a restart.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed 64-bit number
_MIX_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX_2 = -7723592293110705685  # 0x94D049BB133111EB


def request_keys(seed: int, keys: Sequence[tuple[int, int, int]]) -> Tensor:
    """[rows] int64: one number for each (step, prompt, sample) under this seed."""
    state = torch.full((len(keys),), seed, dtype=torch.int64)
    for part in torch.tensor(keys, dtype=torch.int64).reshape(-1, 3).unbind(1):
        state = _mix(state + _GOLDEN) ^ part
    return _mix(state + _GOLDEN)


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
