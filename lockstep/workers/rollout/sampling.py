"""Draw tokens from logits: temperature, penalties, top-k, top-p and min-p, with counted randomness.

The random number behind a token is a function of its key, not of earlier draws. So the same logits give the same token in a batch of 1 or
1,000, in any order, on any number of workers, before or after a restart.
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


_CHUNK = 256
"""Tokens that are summed together when a token is drawn."""


def sample(
    logits: Tensor,
    uniform: Tensor,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    repetition_penalty: float,
    history: Sequence[Tensor] | None = None,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    responses: Sequence[Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Token [rows] and its log-prob [rows] (float32) from `logits` [rows, vocabulary].

    The token is where the cumulative probability passes `uniform` [rows], among the tokens that top-k, then top-p, then min-p keep.
    `history`, a vector of tokens per row, is what the repetition penalty acts on, `responses` what the other two act on. The log-prob is
    that of the whole distribution at `temperature`, without penalty, which is what the trainer computes; at temperature 0 (greedy) it is
    taken at 1. A row with NaN or +inf among its logits gets a log-prob that is not finite, and a token without meaning.
    """
    logits = logits.float() / (temperature or 1.0)
    penalised = logits
    if repetition_penalty != 1.0:
        assert history is not None, "a repetition penalty needs the tokens so far"
        penalised = penalise(logits, history, repetition_penalty)
    if presence_penalty or frequency_penalty:
        assert responses is not None, "these penalties need the responses so far"
        scale = temperature or 1.0  # they are of the logits before the temperature
        penalised = lower(penalised, responses, presence_penalty / scale, frequency_penalty / scale)
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


def lower(logits: Tensor, responses: Sequence[Tensor], presence: float, frequency: float) -> Tensor:
    """Logits less `presence` where the row's response has the token, and less `frequency` for each time."""
    logits = logits.clone()
    for row, tokens in zip(logits, responses, strict=True):
        seen, counts = tokens.to(logits.device).unique(return_counts=True)
        row[seen] -= presence + frequency * counts
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


def keep_likely(logits: Tensor, top_k: int | Tensor, top_p: float | Tensor, min_p: float | Tensor) -> Tensor:
    """Logits at the sampling temperature, -inf where top-k, then top-p, then min-p drop the token.

    A parameter may be [rows, 1], one number for each row; a top-k below 1 keeps all. A token stays when fewer than top_k tokens are
    likelier, when the likelier ones of these hold less than top_p of their probability, and when it has min_p of the likeliest one's.
    So equally likely tokens stay or go together, and the likeliest always stay.
    """
    vocabulary = logits.shape[-1]
    peak = logits.amax(-1, keepdim=True)
    top_k, top_p, min_p = (torch.as_tensor(x, device=logits.device).expand(len(logits), 1) for x in (top_k, top_p, min_p))
    cut = torch.full_like(peak, -torch.inf)
    limits = (top_k > 0) & (top_k < vocabulary)
    if limits.any():
        most = int(torch.where(limits, top_k, 1).max())
        last = logits.topk(most).values.gather(-1, top_k.clamp(1, most).long() - 1)
        cut = torch.where(limits, last, cut)
    limits = top_p < 1.0
    if limits.any():
        weights = torch.where(logits >= cut, torch.exp(logits - peak), 0.0)
        # Tokens with less than (1 - top_p) / vocabulary of the likeliest one's weight hold less than 1 - top_p together: they go unsorted.
        hopeless = peak + torch.log((1.0 - top_p) / vocabulary).float() - 0.01
        most = max(1, int(((logits >= hopeless) & (logits >= cut) & limits).sum(-1).max()))
        ordered, index = logits.topk(most)
        held = weights.gather(-1, index).double()
        stays = held.cumsum(-1) - held < (top_p * weights.double().sum(-1, keepdim=True)).clamp(min=1e-30)
        last = ordered.gather(-1, (stays.sum(-1, keepdim=True) - 1).clamp(min=0))
        cut = torch.where(limits, torch.maximum(cut, last), cut)
    cut = torch.maximum(cut, peak + torch.log(min_p.float()))
    return logits.masked_fill(logits < cut, -torch.inf)
