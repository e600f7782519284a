"""Draw tokens with counted randomness: the number behind a token is a function of its key, not of what was drawn before.

So the same logits give the same token in a batch of 1 or 1,000, in any order, on any number of workers, before or after a restart.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed 64-bit number
_MIX_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX_2 = -7723592293110705685  # 0x94D049BB133111EB

_CHUNK = 256
"""Tokens that are summed together when a token is drawn."""


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


def sample(
    logits: Tensor,
    uniform: Tensor,
    temperature: float,
    top_k: int = -1,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    history: Sequence[Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Token [rows] and its log-prob [rows] (float32) from `logits` [rows, vocabulary].

    The token is where the cumulative probability passes `uniform` [rows], among the tokens that top-k, then top-p, then min-p keep.
    `history`, a vector of tokens a row, is what the repetition penalty acts on. The log-prob is that of the whole distribution at
    `temperature`, without penalty, which is what the trainer computes; at temperature 0 (greedy) it is taken at 1. A row with NaN or +inf
    among its logits gets a log-prob that is not finite, and a token without meaning.
    """
    logits = logits.float() / (temperature or 1.0)
    penalised = logits
    if repetition_penalty != 1.0:
        assert history is not None, "a repetition penalty needs the tokens so far"
        penalised = penalise(logits, history, repetition_penalty)
    if temperature == 0:
        tokens = penalised.argmax(-1)
        return tokens, logits.gather(-1, tokens[:, None]).squeeze(-1) - torch.logsumexp(logits, dim=-1)
    largest = logits.amax(-1, keepdim=True)
    weights = torch.exp(logits - largest)
    log_normaliser = largest.squeeze(-1) + torch.log(weights.sum(-1))
    if penalised is not logits or top_k > 0 or top_p < 1.0 or min_p > 0.0:
        kept = keep_likely(penalised, top_k, top_p, min_p)
        weights = torch.exp(kept - kept.amax(-1, keepdim=True))
    tokens = _invert(weights, uniform)
    return tokens, logits.gather(-1, tokens[:, None]).squeeze(-1) - log_normaliser


def penalise(logits: Tensor, history: Sequence[Tensor], penalty: float) -> Tensor:
    """Logits of tokens in the row's history: divided by `penalty` where positive, multiplied by it where negative."""
    logits = logits.clone()
    for row, tokens in zip(logits, history, strict=True):
        seen = tokens.to(logits.device).unique()
        row[seen] = torch.where(row[seen] > 0, row[seen] / penalty, row[seen] * penalty)
    return logits


def _invert(weights: Tensor, uniform: Tensor) -> Tensor:
    """[rows]: the token where the running sum of `weights` [rows, vocabulary] passes `uniform` of their total.

    In two levels, as a running sum over the whole vocabulary takes longer than all the rest: first the chunk, then the token in it.
    """
    rows, vocabulary = weights.shape
    padded = torch.nn.functional.pad(weights, (0, -vocabulary % _CHUNK)) if vocabulary % _CHUNK else weights
    chunks = padded.view(rows, -1, _CHUNK)
    ends = chunks.sum(-1).cumsum(-1)
    total = ends[:, -1:]
    # Below the total even after rounding, so that the search never passes the last chunk with any weight.
    threshold = torch.minimum(uniform[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    chunk = torch.searchsorted(ends, threshold, right=True).clamp(max=chunks.shape[1] - 1)  # a search among NaN ends past the last
    inside = chunks.gather(1, chunk[..., None].expand(-1, -1, _CHUNK)).squeeze(1).cumsum(-1)
    before = torch.where(chunk > 0, ends.gather(1, (chunk - 1).clamp(min=0)), 0.0)
    rest = torch.minimum(threshold - before, torch.nextafter(inside[:, -1:], torch.zeros_like(total)))
    place = torch.searchsorted(inside, rest, right=True)
    return (chunk * _CHUNK + place).squeeze(-1).clamp(max=vocabulary - 1)


def keep_likely(logits: Tensor, top_k: int, top_p: float, min_p: float) -> Tensor:
    """Logits at the sampling temperature, -inf where top-k, then top-p, then min-p drop the token."""
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
    if min_p > 0.0:
        logits = logits.masked_fill(logits < logits.amax(-1, keepdim=True) + math.log(min_p), -torch.inf)
    return logits


def _mix(x: Tensor) -> Tensor:
    """The finaliser of SplitMix64 (Steele, Lea, Flood 2014) in wrapping 64-bit arithmetic."""
    x = (x ^ _shift(x, 30)) * _MIX_1
    x = (x ^ _shift(x, 27)) * _MIX_2
    return x ^ _shift(x, 31)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Right shift that fills with zeros; torch's fills with the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
