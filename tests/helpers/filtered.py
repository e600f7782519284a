"""Filtered draws of the GPU's kernels, on any device that Triton runs on, beside the CPU's sampler."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from lockstep.generation.gpu.draw import chunk_size, draw, num_chunks
from lockstep.generation.gpu.filters import Filter, keep, note_tokens
from lockstep.generation.gpu.rows import FLOATS, RUNNING, RowState
from lockstep.workers.rollout.sampling import request_keys, sample, uniforms

FILTERS: list[dict[str, float]] = [
    {"top_k": 5},
    {"top_k": 1},
    {"top_p": 0.8, "temperature": 1.3},
    {"top_p": 0.0},
    {"min_p": 0.2},
    {"repetition_penalty": 1.5},
    {"presence_penalty": 1.5, "frequency_penalty": 0.4, "temperature": 0.7},
    {"repetition_penalty": 1.5, "temperature": 0.0},
    {"top_k": 9, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 0.8, "frequency_penalty": -0.2, "temperature": 0.8},
]


def make_rows(count: int, vocabulary: int, options: Mapping[str, float], device: str = "cpu") -> RowState:
    """`count` running rows with these parameters, at the first token of their responses."""
    rows = RowState.make(count, 1, vocabulary, num_chunks(vocabulary), torch.device(device))
    rows.key[:count] = request_keys(0, [(0, i, 0) for i in range(count)]).to(device)
    rows.limit[:count], rows.done[:count] = 9, RUNNING
    everything = slice(0, count)
    temperature = options.get("temperature", 1.0)
    greedy = temperature == 0
    values = {"min_p": 0.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "top_k": -1} | dict(options)
    for name in (*FLOATS[1:], "top_k"):
        rows.option(name, everything).fill_(values.get(name, 1.0))
    rows.inverse_temperature.fill_(1 / (temperature or 1.0))
    rows.greedy.fill_(greedy)
    return rows


def kept_of(logits: Tensor, options: Sequence[tuple[int, float, float]]) -> Tensor:
    """[rows, vocabulary] bool: what stays, with top_k, top_p and min_p of each row."""
    count, vocabulary = logits.shape
    rows = make_rows(count, vocabulary, {}, str(logits.device))
    for name, column in zip(("top_k", "top_p", "min_p"), zip(*options, strict=True), strict=True):
        rows.option(name, slice(0, count)).copy_(torch.tensor(column)[:, None])
    cut = keep(logits, rows, 0, Filter(penalises=False, truncates=True), chunk_size(vocabulary)).cut
    return (logits >= cut[:, None]).cpu()


def check_drawn(logits: Tensor, options: Mapping[str, float], equal: float = 1.0) -> None:
    """At least `equal` of the tokens that the kernels draw are those of the CPU's sampler; log-probs are those of their tokens."""
    count, vocabulary = logits.shape
    rows = make_rows(count, vocabulary, options, str(logits.device))
    penalises = any("penalty" in name for name in options)
    responses = [torch.tensor([i % vocabulary, 3, 3 + i % 2]) for i in range(count)]
    if penalises:
        rows.track_seen(True)
        assert rows.seen is not None
        assert rows.counts is not None
        for row, tokens in enumerate(responses):
            rows.seen[row, tokens.to(logits.device)] = True
            rows.counts[row] = torch.bincount(tokens[:-1], minlength=vocabulary).short()
            rows.token[row] = tokens[-1]
        note_tokens(rows, 0, count)
    truncates = options.get("temperature", 1.0) > 0 and any(name in options for name in ("top_k", "top_p", "min_p"))
    draw(logits, rows, 0, Filter(penalises, truncates))
    uniform = uniforms(rows.key[:count].cpu(), torch.zeros(count, dtype=torch.int64))
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    defaults = {"temperature": 1.0, "top_k": -1, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
    want, _ = sample(
        logits.cpu(),
        uniform,
        *((defaults | dict(options))[name] for name in names),  # type: ignore[arg-type]
        history=responses,
        presence_penalty=options.get("presence_penalty", 0.0),
        frequency_penalty=options.get("frequency_penalty", 0.0),
        responses=responses,
    )
    tokens = rows.token[:count].cpu()
    assert (tokens == want).float().mean() >= equal
    whole = torch.log_softmax(logits.cpu().double() / (options.get("temperature", 1.0) or 1.0), -1).gather(1, tokens[:, None])[:, 0]
    assert (rows.out_log_probs[:count, 0].cpu() - whole).abs().max() < 2e-5
