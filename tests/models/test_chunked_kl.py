"""The divergence from a teacher without the logits of all tokens, against the logits written out."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.distributed import run_distributed
from helpers.largest import Largest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lockstep.models.chunked_head import VocabularyPart
from lockstep.models.chunked_kl import Divergence, chunked_divergence

BETAS = (0.0, 0.1, 0.5, 0.9, 1.0)


def plain_divergence(
    kind: Divergence, targets: Tensor, mask: Tensor, teacher: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, ...]:
    """The definition, by autograd."""
    layers, log_probs = ((hidden, weight, bias), teacher), []
    vocab = min(len(weight), len(teacher[1]))
    for states, matrix, offset in layers:
        logits = (states @ matrix.t() + (0 if offset is None else offset))[:, :vocab]
        log_probs.append(torch.log_softmax(logits / kind.temperature, -1))
    log_p, log_q = log_probs
    own, top, agreement = log_p.gather(-1, targets[:, None])[:, 0], log_p.amax(-1), (log_p.argmax(-1) == log_q.argmax(-1)).double()
    p, q = log_p.exp(), log_q.exp()
    if kind.top_k is not None and kind.top_k < vocab:
        ids = q.topk(kind.top_k).indices
        # The rest is added up, not taken from 1: where it is small, a difference has few digits left.
        p, q = (torch.cat([x.gather(-1, ids), x.scatter(-1, ids, 0.0).sum(-1, keepdim=True)], -1) for x in (p, q))
    m = kind.beta * q + (1 - kind.beta) * p
    if kind.beta == 0:
        value = (q * (q / p).log()).sum(-1)
    elif kind.beta == 1:
        value = (p * (p / q).log()).sum(-1)
    else:
        value = kind.beta * (q * (q / m).log()).sum(-1) + (1 - kind.beta) * (p * (p / m).log()).sum(-1)
    return (value * mask).sum(), value, own, top, agreement


@settings(deadline=None, max_examples=80)
@given(
    tokens=st.integers(0, 9), vocab=st.integers(3, 12), more=st.integers(-1, 2), max_logits=st.integers(1, 60),
    temperature=st.floats(0.5, 3.0), beta=st.sampled_from(BETAS), top_k=st.one_of(st.none(), st.integers(1, 12)),
    with_bias=st.booleans(), factor=st.floats(0.5, 2.0), seed=st.integers(0, 99),
)  # fmt: skip
def test_value_and_gradient_equal_the_logits_written_out(
    tokens: int, vocab: int, more: int, max_logits: int, temperature: float, beta: float, top_k: int | None, with_bias: bool,
    factor: float, seed: int,
) -> None:  # fmt: skip
    """float64, to 1e-10: any divergence, any chunk, hidden states of another size, a vocabulary with other padding."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    teacher = draw(tokens, 7), draw(vocab + more, 7), draw(vocab + more) if with_bias else None
    inputs = [draw(tokens, 5), draw(vocab, 5), *([draw(vocab)] if with_bias else [])]
    targets = torch.randint(0, min(vocab, vocab + more), (tokens,), generator=generator)
    mask = torch.randint(0, 2, (tokens,), generator=generator)
    kind = Divergence(beta, temperature, top_k)

    def run(function: Callable[..., Any], **options: Any) -> tuple[Tensor, ...]:
        leaves = [x.clone().requires_grad_() for x in inputs]
        bias = leaves[2] if with_bias else None
        found = function(kind, targets, mask, teacher, leaves[0], leaves[1], bias, **options)
        return *(x.detach() for x in found), *torch.autograd.grad(factor * found[0], leaves)

    for a, b in zip(run(chunked_divergence, max_logits=max_logits), run(plain_divergence), strict=True):
        torch.testing.assert_close(a, b, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("top_k", [None, 3])
@pytest.mark.parametrize("beta", BETAS)
def test_a_student_that_is_its_teacher_has_exactly_nothing_to_learn(beta: float, top_k: int | None, dtype: torch.dtype) -> None:
    hidden, weight = (torch.randn(n, 8, generator=torch.Generator().manual_seed(n)).to(dtype).requires_grad_() for n in (6, 40))
    kind, targets = Divergence(beta, 0.7, top_k), torch.arange(6)
    total, divergence, _, _, agreement = chunked_divergence(kind, targets, torch.ones(6), (hidden, weight, None), hidden, weight)
    gradients = torch.autograd.grad(total, (hidden, weight))
    assert not any(x.any() for x in (total, divergence, *gradients))
    assert agreement.all()


def test_distributions_that_are_far_apart_stay_finite() -> None:
    """Logits of +-200: p/q is beyond float32 either way."""
    weight = torch.tensor([[200.0], [-200.0], [0.0]])
    for beta in BETAS:
        for top_k in (None, 1):
            hidden = torch.ones(1, 1, requires_grad=True)
            kind, teacher = Divergence(beta, 1.0, top_k), (-torch.ones(1, 1), weight, None)
            total, *_ = chunked_divergence(kind, torch.tensor([0]), torch.ones(1), teacher, hidden, weight)
            assert torch.isfinite(total)
            assert torch.isfinite(torch.autograd.grad(total, hidden)[0]).all()
            assert total >= 0


def test_with_a_tail_the_divergence_grows_towards_the_whole_one() -> None:
    hidden, weight, other = (
        torch.randn(n, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(n)) for n in (5, 30, 31)
    )
    teacher = hidden, other[:30], None
    for beta in BETAS:
        values = [
            chunked_divergence(Divergence(beta, 1.0, k), torch.zeros(5).long(), torch.ones(5), teacher, hidden, weight)[0].item()
            for k in (1, 2, 5, 29, None)
        ]
        assert 0 <= values[0] <= values[-1]
        assert values[-2] == pytest.approx(values[-1], rel=1e-12), "one token of 30 is a tail of its own"


def test_a_vocabulary_that_is_divided_among_ranks_gives_the_same() -> None:
    """float64, to 1e-12: nine tokens over two ranks, parts of five and four; any divergence, more of the teacher's tokens than a part."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight, states, layer = (torch.randn(n, 4, dtype=torch.float64, generator=generator) for n in (6, 9, 6, 9))
    targets, mask = torch.tensor([0, 4, 5, 8, 3, 7]), torch.tensor([1, 1, 0, 1, 1, 1])
    kinds = [Divergence(beta, 0.7, k) for beta in (0.0, 0.4, 1.0) for k in (None, 1, 3, 7, 9)]

    def run(kind: Divergence, rows: slice, part: VocabularyPart | None) -> list[Tensor]:
        leaves = [hidden.clone().requires_grad_(), weight[rows].clone().requires_grad_()]
        found = chunked_divergence(kind, targets, mask, (states, layer[rows], None), *leaves, part=part, max_logits=12)
        return [*(x.detach() for x in found), *torch.autograd.grad(2 * found[0], leaves)]

    def on_rank() -> list[list[Tensor]]:
        rank = dist.get_rank()
        part = VocabularyPart(dist.group.WORLD, start=5 * rank, size=5 - rank, most=5, sums_hidden_grad=True)
        return [run(kind, slice(0, 5) if rank == 0 else slice(5, 9), part) for kind in kinds]

    for kind, *ranks in zip(kinds, *run_distributed(on_rank, 2), strict=True):
        *same, of_weight = run(kind, slice(0, 9), None)
        for found in ranks:
            for a, b in zip(found, same, strict=False):
                torch.testing.assert_close(a, b, atol=1e-12, rtol=0, msg=str(kind))
        torch.testing.assert_close(torch.cat([found[-1] for found in ranks]), of_weight, atol=1e-12, rtol=0)


@pytest.mark.parametrize("top_k", [None, 9])
@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_no_tensor_of_tokens_times_vocabulary_is_made_or_kept(beta: float, top_k: int | None) -> None:
    tokens, vocab, size, limit = 64, 500, 4, 3000
    hidden, weight = torch.randn(tokens, size, requires_grad=True), torch.randn(vocab, size, requires_grad=True)
    teacher, targets = (torch.randn(tokens, 6), torch.randn(vocab, 6), None), torch.randint(0, vocab, (tokens,))
    saved: list[int] = []

    def run(function: Callable[..., Any], **options: Any) -> int:
        saved.clear()
        with Largest() as seen, torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x.numel()) or x, lambda x: x):
            function(Divergence(beta, 1.0, top_k), targets, torch.ones(tokens), teacher, hidden, weight, None, **options)[
                0
            ].backward()
        return seen.numel

    assert run(chunked_divergence, max_logits=limit) <= limit
    assert sum(saved) <= weight.numel() + hidden.numel()
    assert run(plain_divergence) == tokens * vocab, "the plain way must be caught, or the test says nothing"
    assert sum(saved) >= tokens * vocab
