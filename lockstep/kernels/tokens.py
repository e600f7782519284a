# mypy: disable-error-code="no-untyped-def"
# (Triton kernels take no Python types.)
"""Triton kernels of the token head: what it needs of a chunk of float32 logits [M, V], each in one pass over them.

Written out in torch the same takes a dozen passes over the largest tensor of the training step.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _statistics(
    logits, targets, log_probs, log_normaliser, entropy, top, vocabulary, row_stride, inverse_temperature, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * row_stride
    largest = tl.full((), float("-inf"), tl.float32)
    total = tl.zeros((), tl.float32)
    weighted = tl.zeros((), tl.float32)  # sum of exp(z - largest) (z - largest)
    for first in range(0, vocabulary, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        z = tl.load(start + columns, mask=columns < vocabulary, other=float("-inf")) * inverse_temperature
        higher = tl.maximum(largest, tl.max(z, 0))
        # A block of forbidden tokens alone leaves the maximum at -inf, and -inf - -inf is no number.
        base = tl.where(higher == float("-inf"), 0.0, higher)
        moved = tl.where(largest == float("-inf"), 0.0, largest - base)
        keep = tl.where(largest == float("-inf"), 0.0, tl.exp(moved))
        shifted = tl.where(z == float("-inf"), 0.0, z - base)
        mass = tl.where(z == float("-inf"), 0.0, tl.exp(shifted))
        weighted = keep * (weighted + moved * total) + tl.sum(mass * shifted, 0)
        total = keep * total + tl.sum(mass, 0)
        largest = higher
    normaliser = largest + tl.log(total)
    target = tl.load(start + tl.load(targets + row)) * inverse_temperature
    tl.store(log_probs + row, target - normaliser)
    tl.store(log_normaliser + row, normaliser)
    tl.store(entropy + row, tl.log(total) - weighted / total)
    tl.store(top + row, largest - normaliser)


@triton.jit
def _logit_gradient(
    logits, targets, log_normaliser, entropy, log_prob_grad, entropy_grad, out,
    vocabulary, row_stride, inverse_temperature, ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < vocabulary
    z = tl.load(logits + row * row_stride + columns, mask=inside, other=float("-inf")) * inverse_temperature
    log_p = z - tl.load(log_normaliser + row)
    p = tl.exp(log_p)
    g = tl.load(log_prob_grad + row)
    delta = tl.where(columns == tl.load(targets + row), g, 0.0) - g * p
    if ENTROPY:
        surprise = tl.where(p > 0, p * (log_p + tl.load(entropy + row)), 0.0)
        delta -= tl.load(entropy_grad + row) * surprise
    tl.store(out + row * vocabulary + columns, (delta * inverse_temperature).to(out.dtype.element_ty), mask=inside)


def statistics(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-prob of `targets`, log of the normaliser, entropy and largest log-prob, each [M], of softmax(logits [M, V] / temperature)."""
    rows, vocabulary = logits.shape
    outputs = tuple(torch.empty(rows, dtype=torch.float32, device=logits.device) for _ in range(4))
    _statistics[(rows,)](logits, targets, *outputs, vocabulary, logits.stride(0), 1 / temperature, BLOCK=8192, num_warps=8)
    return outputs  # type: ignore[return-value]


def logit_gradient(
    logits: Tensor,
    targets: Tensor,
    log_normaliser: Tensor,
    entropy: Tensor,
    log_prob_grad: Tensor,
    entropy_grad: Tensor | None,
    temperature: float,
    dtype: torch.dtype,
) -> Tensor:
    """The gradient [M, V] in `dtype` that reaches the logits from the log-probs' [M] and, where there is one, the entropies' [M]."""
    rows, vocabulary = logits.shape
    out = torch.empty(rows, vocabulary, dtype=dtype, device=logits.device)
    block = 4096
    _logit_gradient[(rows, triton.cdiv(vocabulary, block))](
        logits, targets, log_normaliser, entropy, log_prob_grad, log_prob_grad if entropy_grad is None else entropy_grad, out,
        vocabulary, logits.stride(0), 1 / temperature, ENTROPY=entropy_grad is not None, BLOCK=block, num_warps=4,
    )  # fmt: skip
    return out
