"""Draw tokens with counted randomness: the number behind a token is a function of its key, not of what was drawn before.

So the same logits give the same token in a batch of 1 or 1,000, in any order, on any number of workers, before or after a restart.
"""

from __future__ import annotations

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


def sample(logits: Tensor, uniform: Tensor, temperature: float, top_k: int = -1, top_p: float = 1.0) -> tuple[Tensor, Tensor]:
    """Token [rows] and its log-prob [rows] (float32) from `logits` [rows, vocabulary].

    The token is where the cumulative probability passes `uniform` [rows], among the tokens that top-k and top-p keep. The log-prob is
    that of the whole distribution at `temperature`, which is what the trainer computes; at temperature 0 (greedy) it is taken at 1.
    A row with NaN or +inf among its logits gets a log-prob that is not finite, and a token without meaning.
    """
    logits = logits.float() / (temperature or 1.0)
    log_normaliser = torch.logsumexp(logits, dim=-1)
    if temperature == 0:
        tokens = logits.argmax(-1)
    else:
        probs = torch.exp(_keep_likely(logits, top_k, top_p) - log_normaliser[:, None])
        cumulative = probs.cumsum(-1)
        total = cumulative[:, -1:]
        # Below the total even after rounding, so that the search never passes the last token with any probability.
        threshold = torch.minimum(uniform[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
        tokens = torch.searchsorted(cumulative, threshold, right=True).squeeze(-1)
        tokens = tokens.clamp(max=logits.shape[-1] - 1)  # a search among NaN ends past the last token
    return tokens, logits.gather(-1, tokens[:, None]).squeeze(-1) - log_normaliser


def _keep_likely(logits: Tensor, top_k: int, top_p: float) -> Tensor:
    if top_k > 0 and top_k < logits.shape[-1]:
        smallest = logits.topk(top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < smallest, -torch.inf)
    if top_p < 1.0:
        ordered, index = logits.sort(dim=-1, descending=True)
        probs = ordered.softmax(-1)
        # A token stays when the likelier ones hold less than top_p; the likeliest always stays.
        dropped = (probs.cumsum(-1) - probs) >= top_p
        dropped[:, 0] = False
        logits = logits.masked_fill(torch.zeros_like(dropped).scatter(-1, index, dropped), -torch.inf)
    return logits


def _mix(x: Tensor) -> Tensor:
    """The finaliser of SplitMix64 (Steele, Lea, Flood 2014) in wrapping 64-bit arithmetic."""
    x = (x ^ _shift(x, 30)) * _MIX_1
    x = (x ^ _shift(x, 27)) * _MIX_2
    return x ^ _shift(x, 31)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Right shift that fills with zeros; torch's fills with the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
