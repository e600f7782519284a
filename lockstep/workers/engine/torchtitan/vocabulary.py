"""Log-probs and entropy of given tokens where each rank has the output weights of a part of the vocabulary.

As lockstep/models/token_head.py, with sums over the vocabulary that are finished by all ranks of a group: four numbers a token are
exchanged, never logits. Legend: M tokens, H hidden size, V vocabulary, v this rank's part of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_MAX_LOGITS = {"cuda": 1 << 29, "cpu": 1 << 24}
"""Entries of one chunk of logits on one rank, at least one token's."""


def sharded_log_probs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float,
    entropy_grad: bool,
    group: dist.ProcessGroup,
    vocabulary: int,
    max_logits: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-prob [M] of `targets` [M] and entropy [M] under softmax(hidden [M, H] weights^T [V, H] / temperature), on every rank alike.

    `weight` [v, H] are this rank's rows where V = `vocabulary` rows are divided as DTensor does, the last rank having fewer. In float32.
    The entropy carries a gradient only when `entropy_grad` asks for it. The gradient of `hidden` is this rank's part of it: who calls
    adds them up over the group.
    """
    part = -(-vocabulary // group.size())
    chunk = max(1, (max_logits or _MAX_LOGITS.get(hidden.device.type, _MAX_LOGITS["cpu"])) // part)
    return _ShardedLogProbs.apply(hidden, weight, targets - group.rank() * part, temperature, entropy_grad, group, chunk)


class _ShardedLogProbs(torch.autograd.Function):
    """With z the logits over the temperature, p = softmax(z), t the target, S the entropy:

    log p_t = z_t - logsumexp(z),  S = logsumexp(z) - sum p z,  d log p_t / dz = onehot(t) - p,  dS / dz = -p (log p + S)

    Targets are counted from this rank's first row; those of other ranks are outside of its rows.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperature: float,
        entropy_grad: bool,
        group: dist.ProcessGroup,
        chunk: int,
    ) -> tuple[Tensor, Tensor]:
        own = (targets >= 0) & (targets < len(weight))
        targets = targets.where(own, 0)[:, None]
        log_probs = torch.empty(len(targets), dtype=torch.float32, device=hidden.device)
        entropy, log_normaliser = torch.empty_like(log_probs), torch.empty_like(log_probs)
        for rows in _chunks(len(targets), chunk):
            logits = _product(hidden[rows], weight.t()).div_(temperature)
            highest = logits.amax(-1)
            dist.all_reduce(highest, dist.ReduceOp.MAX, group)
            powers = (logits - highest[:, None]).exp_()
            target_logits = logits.gather(-1, targets[rows]).squeeze(-1).where(own[rows], 0.0)
            sums = torch.stack([powers.sum(-1), powers.mul_(logits).sum(-1), target_logits])
            dist.all_reduce(sums, dist.ReduceOp.SUM, group)
            total, weighted, target_logits = sums
            log_normaliser[rows] = highest + total.log()
            log_probs[rows] = target_logits - log_normaliser[rows]
            entropy[rows] = log_normaliser[rows] - weighted / total
        ctx.save_for_backward(hidden, weight, targets, own, log_normaliser, entropy)
        ctx.temperature, ctx.entropy_grad, ctx.chunk = temperature, entropy_grad, chunk
        if not entropy_grad:
            ctx.mark_non_differentiable(entropy)
        return log_probs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, own, log_normaliser, entropy = ctx.saved_tensors
        log_prob_grad, entropy_grad = (grad[:, None] if grad is not None else None for grad in grads)
        hidden_grad = torch.empty_like(hidden)
        weight_grad = torch.zeros_like(weight, dtype=torch.float32)
        for rows in _chunks(len(targets), ctx.chunk):
            log_probs = _product(hidden[rows], weight.t()).div_(ctx.temperature).sub_(log_normaliser[rows, None])
            delta = log_probs.exp()
            if ctx.entropy_grad:
                delta.mul_((log_probs + entropy[rows, None]).mul_(-entropy_grad[rows]).sub_(log_prob_grad[rows]))
            else:
                delta.mul_(-log_prob_grad[rows])
            delta.scatter_add_(-1, targets[rows], log_prob_grad[rows].where(own[rows, None], 0.0))
            delta = delta.div_(ctx.temperature).to(hidden.dtype)
            hidden_grad[rows] = delta @ weight
            weight_grad += _product(delta.t(), hidden[rows])
        return hidden_grad, weight_grad.to(weight.dtype), *(None,) * 5


def _chunks(total: int, size: int) -> Iterator[slice]:
    return (slice(start, start + size) for start in range(0, total, size))


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a b in float32; on a GPU as it was summed up, not rounded to the type of the factors first."""
    if a.is_cuda and a.dtype in (torch.bfloat16, torch.float16):
        return torch.mm(a, b, out_dtype=torch.float32)
    return (a @ b).float()
