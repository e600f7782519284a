"""Log-probs over a divided vocabulary against the whole one (models/token_head.py), value and gradient, to 1e-5 of their size."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from helpers.distributed import run_distributed
from torch import Tensor

from lockstep.models.token_head import target_log_probs
from lockstep.workers.engine.torchtitan.vocabulary import sharded_log_probs

TOKENS, WIDTH, VOCABULARY, TEMPERATURE = 7, 5, 11, 0.6


def _inputs() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, WIDTH, generator=generator) * 2 for n in (TOKENS, VOCABULARY))
    targets = torch.randint(VOCABULARY, (TOKENS,), generator=generator)
    return hidden, weight, targets, torch.randn(2, TOKENS, generator=generator)


@pytest.mark.parametrize("entropy_grad", [False, True])
@pytest.mark.parametrize("max_logits", [None, 12])
def test_a_divided_vocabulary_gives_the_numbers_of_the_whole_one(max_logits: int | None, entropy_grad: bool) -> None:
    hidden, weight, targets, factors = _inputs()

    def total(log_probs: Tensor, entropy: Tensor) -> Tensor:
        return (factors[0] * log_probs).sum() + ((factors[1] * entropy).sum() if entropy_grad else 0.0)

    def divided() -> tuple[Tensor, ...]:
        rank, part = dist.get_rank(), -(-VOCABULARY // dist.get_world_size())
        own_hidden = hidden.detach().clone().requires_grad_()
        own = weight.detach()[rank * part : (rank + 1) * part].clone().requires_grad_()
        group = dist.group.WORLD
        columns = sharded_log_probs(own_hidden, own, targets, TEMPERATURE, entropy_grad, group, VOCABULARY, max_logits)
        assert columns[1].requires_grad == entropy_grad
        total(*columns).backward()
        dist.all_reduce(own_hidden.grad)
        return *(column.detach() for column in columns), own_hidden.grad, own.grad

    hidden.requires_grad_()
    weight.requires_grad_()
    expected = target_log_probs(hidden, weight, None, targets, TEMPERATURE, entropy_grad)
    total(*expected).backward()
    ranks = run_distributed(divided, 2)
    for log_probs, entropy, hidden_grad, _ in ranks:
        torch.testing.assert_close(log_probs, expected[0].detach(), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(entropy, expected[1].detach(), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(hidden_grad, hidden.grad, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(torch.cat([weight_grad for *_, weight_grad in ranks]), weight.grad, atol=1e-5, rtol=1e-5)
