"""How far a student's next-token distribution is from its teacher's, over the whole vocabulary, a chunk of tokens at a time.

The logits of M tokens over a vocabulary of V exist for a chunk of tokens, once for each model, and so does the gradient that reaches the
student's: it is known as soon as the logits are, because the loss is the plain sum over trained tokens. What is kept between forward and
backward is the gradient of the student's hidden states and output layer.

With log p the student's and log q the teacher's log-probs, both at one temperature, and m = beta q + (1 - beta) p:

```text
beta = 0      KL(q || p), the forward KL                       its gradient with respect to the student's logits / temperature
0 < beta < 1  beta KL(q || m) + (1 - beta) KL(p || m)          0: p - q
beta = 1      KL(p || q), the reverse KL                       between: (1 - beta) p (log p/m - KL(p || m)),  1: p (log p/q - KL)
```

(Agarwal et al., arXiv 2306.13649.) With `top_k` the vocabulary is the teacher's k most likely tokens and one more that stands for all
others: still a divergence, never above the whole one. Without that tail the mass that leaves the k tokens would be free.

Memory: at most SEVEN tensors of `MAX_LOGITS` numbers exist at a time: 7 * 2^25 * 4 bytes = 0.9 GB on a GPU, whatever M and V, beside the
gradients of what is given. Where the vocabulary is divided among ranks (`VocabularyPart`) each has the logits of its own part, and they
exchange a few numbers per token. Legend: M tokens, H hidden size, V vocabulary.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from lockstep.models.chunked_head import LayerGradients, VocabularyPart, layer_logits, slices, sum_dtype

MAX_LOGITS = {"cuda": 1 << 25, "cpu": 1 << 22}
"""Entries of one chunk of logits, at least one token's: there are several such tensors here."""

Layer = tuple[Tensor, Tensor, Tensor | None]
"""Hidden states [M, H], and weight [V, H] and bias [V] of an output layer."""


@dataclass(frozen=True)
class Divergence:
    """What is compared."""

    beta: float
    """0 is the forward KL, 1 the reverse one, between them the generalised Jensen-Shannon divergence."""
    temperature: float
    """The logits of both are divided by it."""
    top_k: int | None
    """Compare the teacher's k most likely tokens and the rest as one; None compares all."""


DIVERGENCE_COLUMNS = ("divergence_sum", "divergence", "log_probs", "top_log_probs", "agreement")
"""What `chunked_divergence` returns."""


def chunked_divergence(
    kind: Divergence,
    targets: Tensor,
    mask: Tensor,
    teacher: Layer,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    part: VocabularyPart | None = None,
    max_logits: int | None = None,
) -> tuple[Tensor, ...]:
    """The sum [] of the divergence over the tokens in `mask` [M], with a gradient for the student (`hidden`, `weight`, `bias`) alone;
    then, [M] and without one: the divergence, the student's log-prob of `targets` [M] and of its most likely token, and 1 where both
    models have the same most likely token.

    In float32 (float64 for float64 inputs). Where the two vocabularies have different sizes, what is behind the smaller one is left
    out: padding of the larger. With `part` both layers are that part of one vocabulary, and every rank of its group has to call this
    with the same tokens; see `chunked_log_probs`.
    """
    vocab = min(len(weight), len(teacher[1])) if part is None else part.size
    weight, bias = _first(weight, vocab), _first(bias, vocab)
    teacher = (teacher[0], _first(teacher[1], vocab), _first(teacher[2], vocab))
    limit = max_logits or MAX_LOGITS.get(hidden.device.type, MAX_LOGITS["cpu"])
    learns = torch.is_grad_enabled()
    chunk = max(1, limit // (vocab if part is None else part.most))
    found: tuple[Tensor, ...] = _ChunkedDivergence.apply(kind, chunk, part, learns, targets, mask, teacher, hidden, weight, bias)
    return found


class _ChunkedDivergence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        kind: Divergence,
        chunk: int,
        part: VocabularyPart | None,
        learns: bool,
        targets: Tensor,
        mask: Tensor,
        teacher: Layer,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
    ) -> tuple[Tensor, ...]:
        needs = ctx.needs_input_grad[7:] if learns else (False,) * 3
        gradients = LayerGradients(hidden, weight, bias, needs)
        mask = mask.to(sum_dtype(hidden.dtype))
        divergence, log_probs, top, agreement = (torch.empty_like(mask) for _ in range(4))
        for rows in slices(len(targets), chunk):
            own = layer_logits(hidden[rows], weight, bias, None)
            other = layer_logits(teacher[0][rows], *teacher[1:], None).to(own.dtype)
            agreement[rows] = (_most_likely(own, part) == _most_likely(other, part)).to(own.dtype)
            own, other = (_log_softmax(logits.div_(kind.temperature), part) for logits in (own, other))
            log_probs[rows], top[rows] = _chosen(own, targets[rows, None], part)[:, 0], own.amax(-1)
            divergence[rows], delta = _compare(own, other, kind, part)
            if any(needs):
                delta *= (mask[rows] / kind.temperature)[:, None]
                gradients.add(rows, delta.to(hidden.dtype))
        if part is not None:
            dist.all_reduce(top, dist.ReduceOp.MAX, group=part.group)
        ctx.save_for_backward(*gradients.rounded(part))
        ctx.mark_non_differentiable(divergence, log_probs, top, agreement)
        return torch.dot(divergence, mask), divergence, log_probs, top, agreement

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        found = (None if gradient is None else gradient * grads[0].to(gradient.dtype) for gradient in ctx.saved_tensors)
        return *(None,) * 7, *found


def _compare(own: Tensor, other: Tensor, kind: Divergence, part: VocabularyPart | None) -> tuple[Tensor, Tensor]:
    """The divergence [m] of log-probs [m, V], and its gradient [m, V] with respect to the student's. Both are used up."""
    if kind.top_k is None or kind.top_k >= _whole_size(own, part):
        return _divergence(own, other, kind.beta, part)
    ids = _top_ids(other, kind.top_k, part)
    other = _with_tail(other, ids, part)[0]
    buckets, others = _with_tail(own, ids, part)
    divergence, of_buckets = _divergence(buckets.clone(), other, kind.beta, None)
    # A token of the tail has its share of what reaches the tail; the k have none of it.
    delta = others.sub_(buckets[:, -1:]).exp_().mul_(of_buckets[:, -1:])
    places, here = _places(ids, part)
    return divergence, delta.scatter_add_(-1, places, of_buckets[:, :-1].where(here, 0.0))


def _with_tail(log_probs: Tensor, ids: Tensor, part: VocabularyPart | None) -> tuple[Tensor, Tensor]:
    """Log-probs [m, k + 1] of the tokens `ids` [m, k] and of all others together; and `log_probs`, which are used up, without the k."""
    chosen, (places, here) = _chosen(log_probs, ids, part), _places(ids, part)
    others = log_probs.scatter_add_(-1, places, torch.full_like(chosen, -torch.inf).where(here, 0.0))
    return torch.cat([chosen, _log_normaliser(others, part)[:, None]], -1), others


def _divergence(log_p: Tensor, log_q: Tensor, beta: float, part: VocabularyPart | None) -> tuple[Tensor, Tensor]:
    """The divergence [m] and its gradient [m, V] with respect to log p before it is normalised. Both inputs are used up.

    Equal distributions give exactly 0, and so does their gradient.
    """
    if beta == 1.0:
        difference, p = log_q.neg_().add_(log_p), log_p.exp_()
        value = _total(p * difference, part)
        return value, difference.sub_(value[:, None]).mul_(p)
    difference = log_q - log_p
    if beta == 0.0:
        q = log_q.exp_()
        return _total(difference.mul_(q), part), log_p.exp_().sub_(q)
    above = _log_mixture(difference, beta)
    p, q = log_p.exp_(), log_q.exp_()
    of_teacher = _total(difference.sub_(above).mul_(q), part)
    of_student = _total(above.neg_().mul(p), part)
    delta = above.sub_(of_student[:, None]).mul_(p).mul_(1 - beta)
    return beta * of_teacher + (1 - beta) * of_student, delta


def _log_mixture(difference: Tensor, beta: float) -> Tensor:
    """log m/p from log q/p, of the larger of p and q, so that no exponential overflows."""
    inner = difference.abs().neg_().expm1_()
    share_of_smaller = torch.where(difference > 0, inner.new_tensor(1 - beta), inner.new_tensor(beta))
    return inner.mul_(share_of_smaller).log1p_().add_(difference.clamp(min=0))


def _log_softmax(logits: Tensor, part: VocabularyPart | None) -> Tensor:
    return logits.sub_(_log_normaliser(logits, part)[:, None])


# -- over the whole vocabulary, where this rank may have a part of it -----------------------------------------------------


def _log_normaliser(logits: Tensor, part: VocabularyPart | None) -> Tensor:
    return torch.logsumexp(logits, -1) if part is None else part.log_normaliser(logits)


def _total(x: Tensor, part: VocabularyPart | None) -> Tensor:
    """The sum [m] over the vocabulary."""
    total = x.sum(-1)
    if part is not None:
        dist.all_reduce(total, group=part.group)
    return total


def _places(ids: Tensor, part: VocabularyPart | None) -> tuple[Tensor, Tensor]:
    """Where the tokens are here, and whether they are."""
    return (ids, torch.ones_like(ids, dtype=torch.bool)) if part is None else part.places(ids)


def _chosen(x: Tensor, ids: Tensor, part: VocabularyPart | None) -> Tensor:
    """The numbers [m, k] of tokens `ids` [m, k], whoever has them."""
    if part is None:
        return x.gather(-1, ids)
    places, here = part.places(ids)
    found = x.gather(-1, places).where(here, 0.0)
    dist.all_reduce(found, group=part.group)
    return found


def _most_likely(logits: Tensor, part: VocabularyPart | None) -> Tensor:
    return logits.argmax(-1) if part is None else _top_ids(logits, 1, part)[:, 0]


def _top_ids(x: Tensor, count: int, part: VocabularyPart | None) -> Tensor:
    """The tokens [m, count] with the largest numbers, the same on every rank."""
    if part is None:
        return x.topk(count, dim=-1).indices
    # A part may have fewer tokens than are asked for, and another part all of them.
    best, places = x.topk(min(count, part.size), dim=-1)
    missing = (0, min(count, part.most) - best.shape[-1])
    parts = [F.pad(best, missing, value=-torch.inf), F.pad(places + part.start, missing)]
    best, ids = (_joined(tensor, part) for tensor in parts)
    return ids.gather(-1, best.topk(count, dim=-1).indices)


def _joined(x: Tensor, part: VocabularyPart) -> Tensor:
    """[m, n] of all ranks side by side."""
    parts = [torch.empty_like(x) for _ in range(part.group.size())]
    dist.all_gather(parts, x.contiguous(), group=part.group)
    return torch.cat(parts, -1)


def _whole_size(x: Tensor, part: VocabularyPart | None) -> int:
    if part is None:
        return x.shape[-1]
    size = torch.tensor(part.size, device=x.device)
    dist.all_reduce(size, group=part.group)
    return int(size)


def _first(x: Any, count: int) -> Any:
    return x if x is None or len(x) == count else x[:count]
