"""Rows become tensors here and nowhere else: which rows go together (micro-batches), and how they lie end to end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.errors import ConfigError
from lockstep.models.attention import PackedLayout
from lockstep.protocol import DataProto, Ragged


@dataclass(frozen=True, slots=True)
class Budget:
    """How much one micro-batch may hold. It bounds memory and never changes a result."""

    max_tokens: int
    """Tokens in one micro-batch; used when max_rows is None."""
    max_rows: int | None = None
    """Rows in one micro-batch."""


@dataclass(frozen=True, slots=True)
class PackedRows:
    """One micro-batch: rows end to end, without padding. N tokens, M of them response tokens."""

    input_ids: Tensor
    """[1, N]"""
    position_ids: Tensor
    """[1, N], restarting at 0 in each row."""
    layout: PackedLayout
    """Where each row lies."""
    predict_at: Tensor
    """[M]: the position whose output predicts each response token, which is the one before it."""
    targets: Tensor
    """[M]: the response tokens."""
    response_lengths: Tensor
    """[rows], on the CPU: how the M entries divide into rows."""


def cut_into_micro_batches(token_counts: Sequence[int], budget: Budget) -> list[list[int]]:
    """Row numbers of each micro-batch, in order. Raises ConfigError for a row that is longer than the token budget."""
    batches: list[list[int]] = []
    used = 0
    for row, count in enumerate(token_counts):
        if budget.max_rows is None and count > budget.max_tokens:
            raise ConfigError(
                f"row {row} has {count} tokens, more than a micro-batch may hold ({budget.max_tokens}); "
                "raise ppo_max_token_len_per_gpu (or log_prob_max_token_len_per_gpu, max_token_len_per_gpu)"
            )
        full = len(batches[-1]) >= budget.max_rows if budget.max_rows and batches else used + count > budget.max_tokens
        if not batches or full:
            batches.append([])
            used = 0
        batches[-1].append(row)
        used += count
    return batches


def pack_rows(data: DataProto, device: torch.device) -> PackedRows:
    """Lay the prompt and response of every row end to end."""
    prompts, responses = data.ragged("prompts"), data.ragged("responses")
    lengths = prompts.lengths + responses.lengths
    starts = torch.cumsum(lengths, 0) - lengths
    parts = [part for pair in zip(prompts.rows(), responses.rows(), strict=True) for part in pair]
    input_ids = torch.cat(parts)
    position_ids = torch.arange(len(input_ids)) - torch.repeat_interleave(starts, lengths)
    first_target = starts + prompts.lengths
    offsets = torch.arange(len(responses.values)) - torch.repeat_interleave(
        torch.cumsum(responses.lengths, 0) - responses.lengths, responses.lengths
    )
    predict_at = torch.repeat_interleave(first_target - 1, responses.lengths) + offsets
    return PackedRows(
        input_ids=input_ids[None].to(device),
        position_ids=position_ids[None].to(device),
        layout=PackedLayout(lengths, device),
        predict_at=predict_at.to(device),
        targets=responses.values.to(device),
        response_lengths=responses.lengths,
    )


def pad_rows(rows: Ragged, pad_token_id: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Ids and attention mask [R, L] padded on the right, for models that pool over whole sequences."""
    mask = rows.like(torch.ones_like(rows.values)).pad(0)
    return rows.pad(pad_token_id).to(device), mask.to(device)


def placeholder_row() -> DataProto:
    """One prompt token and one response token: what a rank without rows computes, so that every rank joins every collective."""
    token = Ragged.from_rows([[0]], dtype=torch.int64)
    return DataProto.from_dict({"prompts": token, "responses": token})
