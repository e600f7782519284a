"""Log-probs without logits, against the logits written out."""

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

from lockstep.algorithms.rows import Rows
from lockstep.models.chunked_head import ChunkedLoss, LossPass, TokenOutputs, chunked_log_probs
from lockstep.models.packing import TokenRows
from lockstep.models.vocabulary_part import VocabularyPart
from lockstep.workers.engine.base import LANGUAGE_COLUMNS


def plain_log_probs(
    targets: Tensor, temperature: float, entropy_grad: bool, hidden: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    log_probs = torch.log_softmax((hidden @ weight.t() + (0 if bias is None else bias)) / temperature, dim=-1)
    own = log_probs[torch.arange(len(targets)), targets]
    return own, -(log_probs.exp() * log_probs).sum(-1), log_probs.detach().amax(-1)


@settings(deadline=None, max_examples=40)
@given(
    tokens=st.integers(0, 9), vocab=st.integers(2, 12), max_logits=st.integers(1, 60), temperature=st.floats(0.3, 3.0),
    with_bias=st.booleans(), entropy_grad=st.booleans(), seed=st.integers(0, 99),
)  # fmt: skip
def test_values_and_gradients_equal_the_logits_written_out(
    tokens: int, vocab: int, max_logits: int, temperature: float, with_bias: bool, entropy_grad: bool, seed: int
) -> None:
    """float64: nothing but the order of additions differs, so 1e-12."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    inputs = [draw(tokens, 5), 3 * draw(vocab, 5), *([draw(vocab)] if with_bias else [])]
    targets = torch.randint(0, vocab, (tokens,), generator=generator)
    weights = draw(2, tokens)

    def run(function: Callable[..., Any], **options: Any) -> tuple[Tensor, ...]:
        leaves = [x.clone().requires_grad_() for x in inputs]
        bias = leaves[2] if with_bias else None
        log_probs, entropy, top = function(targets, temperature, entropy_grad, leaves[0], leaves[1], bias, **options)
        loss = (weights[0] * log_probs).sum() + ((weights[1] * entropy).sum() if entropy_grad else 0)
        return log_probs.detach(), entropy.detach(), top.detach(), *torch.autograd.grad(loss, leaves)

    mine, want = run(chunked_log_probs, max_logits=max_logits), run(plain_log_probs)
    for a, b in zip(mine, want, strict=True):
        torch.testing.assert_close(a, b, atol=1e-12, rtol=1e-12)


@settings(deadline=None, max_examples=30)
@given(
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=4), most=st.integers(4, 9),
    temperature=st.floats(0.3, 3.0), with_bias=st.booleans(), entropy_grad=st.booleans(),
    factor=st.floats(0.5, 2.0), seed=st.integers(0, 99),
)  # fmt: skip
def test_a_loss_taken_chunk_by_chunk_is_that_of_the_log_probs(
    sizes: list[int], most: int, temperature: float, with_bias: bool, entropy_grad: bool, factor: float, seed: int
) -> None:
    """A loss that is not linear, so that its gradient depends on the log-probs; float64, so 1e-12."""
    generator = torch.Generator().manual_seed(seed)
    tokens, vocab = sum(sizes), 7

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    inputs = [draw(tokens, 5), 3 * draw(vocab, 5), *([draw(vocab)] if with_bias else [])]
    targets, weights = torch.randint(0, vocab, (tokens,), generator=generator), draw(2, tokens)
    rows = TokenRows(Rows(torch.tensor(sizes)), {"a": weights[0], "b": weights[1]}, range(len(sizes)))

    def loss_fn(outputs: TokenOutputs, chunk: TokenRows) -> tuple[Tensor, dict[str, Any]]:
        of_log_probs = (chunk.columns["a"] * (0.1 * outputs.log_probs).exp()).sum()
        return of_log_probs + (chunk.columns["b"] * outputs.entropy.square()).sum(), {"rows": len(chunk.rows)}

    def run(at_once: bool) -> tuple[Tensor, ...]:
        leaves = [x.clone().requires_grad_() for x in inputs]
        layer = leaves[0], leaves[1], leaves[2] if with_bias else None
        asked = LossPass(loss_fn, temperature, entropy_grad, scale=factor)
        if at_once:
            chunks = rows.chunks(most)
            loss = ChunkedLoss.apply(asked, chunks, targets, *layer, None)
            assert [metrics["rows"] for _, metrics, _ in asked.found] == [len(chunk.rows) for chunk in chunks]
            assert sum(metrics["rows"] for _, metrics, _ in asked.found) == len(sizes)
        else:
            columns = chunked_log_probs(targets, temperature, entropy_grad, *layer)
            loss = asked.loss_of(dict(zip(LANGUAGE_COLUMNS, columns, strict=True)), rows)
        found = sum(part for part, _, _ in asked.found)
        return found, *torch.autograd.grad(loss, leaves, materialize_grads=True)

    for a, b in zip(run(True), run(False), strict=True):
        torch.testing.assert_close(a, b, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize(("ranks", "vocab"), [(2, 6), (2, 7), (3, 4)])
def test_a_divided_vocabulary_gives_what_a_whole_one_gives(ranks: int, vocab: int) -> None:
    """Parts with padding, and one that is nothing else; float64, so 1e-12."""
    generator = torch.Generator().manual_seed(vocab)
    hidden, weight = (torch.randn(n, 5, generator=generator, dtype=torch.float64) for n in (9, vocab))
    targets = torch.randint(0, vocab, (9,), generator=generator)
    loss_weights = torch.randn(2, 9, generator=generator, dtype=torch.float64)
    rows = -(-vocab // ranks)

    def gradients(hidden: Tensor, weight: Tensor, part: VocabularyPart | None) -> tuple[Tensor, ...]:
        leaves = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        columns = chunked_log_probs(targets, 0.7, True, *leaves, part=part, max_logits=2 * rows)
        assert not columns[2].requires_grad
        loss = sum((w * column).sum() for w, column in zip(loss_weights, columns, strict=False))
        return *(column.detach() for column in columns), *torch.autograd.grad(loss, leaves)

    def on_rank() -> tuple[Tensor, ...]:
        start = dist.get_rank() * rows
        size = max(0, min(rows, vocab - start))
        mine = torch.nn.functional.pad(weight[start : start + rows], (0, 0, 0, rows - size), value=7.0)
        return gradients(hidden, mine, VocabularyPart(dist.group.WORLD, start, size, most=rows))

    results = run_distributed(on_rank, ranks)
    *columns, hidden_grad, weight_grad = gradients(hidden, weight, None)
    torch.testing.assert_close(columns[2], torch.log_softmax(hidden @ weight.t() / 0.7, -1).amax(-1), atol=1e-12, rtol=0)
    for result in results:
        torch.testing.assert_close(result[:3], tuple(columns), atol=1e-12, rtol=0)
    torch.testing.assert_close(sum(result[3] for result in results), hidden_grad, atol=1e-12, rtol=0)
    parts = torch.cat([result[4] for result in results])
    torch.testing.assert_close(parts[:vocab], weight_grad, atol=1e-12, rtol=0)
    assert not parts[vocab:].any()


def test_a_forbidden_token_makes_neither_entropy_nor_gradient_nan() -> None:
    hidden, weight = torch.ones(1, 1, requires_grad=True), torch.tensor([[1.0], [0.5], [0.0]], requires_grad=True)
    bias = torch.tensor([0.0, 0.0, -torch.inf])
    log_probs, entropy, _ = chunked_log_probs(torch.tensor([0]), 2.0, True, hidden, weight, bias)
    (log_probs.sum() + entropy.sum()).backward()
    torch.testing.assert_close(entropy[0], torch.distributions.Categorical(logits=torch.tensor([0.5, 0.25])).entropy())
    assert torch.isfinite(hidden.grad).all()
    assert torch.isfinite(weight.grad).all()


def test_neither_pass_makes_or_keeps_a_tensor_of_tokens_times_vocabulary() -> None:
    tokens, vocab, size, limit = 64, 500, 4, 3000
    hidden, weight = torch.randn(tokens, size, requires_grad=True), torch.randn(vocab, size, requires_grad=True)
    targets = torch.randint(0, vocab, (tokens,))
    saved = []

    def run(function: Callable[..., Any], **options: Any) -> int:
        saved.clear()
        with Largest() as largest, torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x.numel()) or x, lambda x: x):
            log_probs, entropy, *_ = function(targets, 1.0, True, hidden, weight, None, **options)
            (log_probs.sum() + entropy.sum()).backward()
        return largest.numel

    assert run(chunked_log_probs, max_logits=limit) <= limit
    assert sum(saved) <= weight.numel() + hidden.numel() + 3 * tokens
    assert run(plain_log_probs) == tokens * vocab, "the plain way must be caught, or the test says nothing"
    assert sum(saved) >= tokens * vocab


def test_a_vocabulary_that_is_split_over_ranks_gives_the_same_log_probs_entropy_and_gradients() -> None:
    """Seven tokens over two ranks: parts of four and three. What differs is the order of additions."""
    hidden, weight, bias = (torch.randn(*shape, generator=torch.Generator().manual_seed(0)) for shape in ((5, 6), (7, 6), (7,)))
    targets = torch.tensor([0, 3, 4, 6, 2])

    def run(rows: slice, part: VocabularyPart | None) -> list[torch.Tensor]:
        own = [hidden.clone().requires_grad_(), weight[rows].clone().requires_grad_(), bias[rows].clone().requires_grad_()]
        log_probs, entropy, _ = chunked_log_probs(targets, 0.7, True, *own, part=part, max_logits=16)
        (log_probs.sum() + 0.3 * (entropy**2).sum()).backward()
        return [log_probs.detach(), entropy.detach(), *(tensor.grad for tensor in own)]

    def on_rank() -> list[torch.Tensor]:
        rank = dist.get_rank()
        part = VocabularyPart(dist.group.WORLD, start=4 * rank, size=4 - rank, most=4, sums_hidden_grad=True)
        return run(slice(0, 4) if rank == 0 else slice(4, 7), part)

    whole = run(slice(None), None)
    first, second = run_distributed(on_rank, 2)
    for ranks in (first, second):
        for got, want in zip(ranks[:3], whole[:3], strict=True):
            torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-5)
    for place in (3, 4):
        torch.testing.assert_close(torch.cat([first[place], second[place]]), whole[place], atol=1e-6, rtol=1e-5)
