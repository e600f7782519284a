"""Log-probs without logits, against the logits written out."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.distributed import run_distributed
from helpers.families import FAMILIES
from helpers.largest import Largest
from helpers.tiny import tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lockstep.algorithms.rows import Rows
from lockstep.models.attention import PACKED, PackedLayout
from lockstep.models.chunked_head import (
    ChunkedLoss,
    LossOutput,
    LossPass,
    TokenOutputs,
    VocabularyPart,
    chunked_log_probs,
    hand_out_hidden,
    logits_are_the_layers,
    logits_log_probs,
)
from lockstep.models.packing import TokenRows
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

    def loss_fn(outputs: TokenOutputs, chunk: TokenRows) -> LossOutput:
        of_log_probs = (chunk.columns["a"] * (0.1 * outputs.log_probs).exp()).sum()
        return LossOutput(of_log_probs + (chunk.columns["b"] * outputs.entropy.square()).sum(), {"rows": len(chunk.rows)})

    def run(at_once: bool) -> tuple[Tensor, ...]:
        leaves = [x.clone().requires_grad_() for x in inputs]
        layer = leaves[0], leaves[1], leaves[2] if with_bias else None
        asked = LossPass(loss_fn, temperature, entropy_grad, scale=factor)
        if at_once:
            chunks = rows.chunks(most)
            loss = ChunkedLoss.apply(asked, chunks, targets, *layer, None)
            assert [output.metrics["rows"] for output, _ in asked.found] == [len(chunk.rows) for chunk in chunks]
            assert sum(output.metrics["rows"] for output, _ in asked.found) == len(sizes)
        else:
            columns = chunked_log_probs(targets, temperature, entropy_grad, *layer)
            loss = asked.loss_of(dict(zip(LANGUAGE_COLUMNS, columns, strict=True)), rows)
        found = sum(output.loss for output, _ in asked.found)
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


def test_a_forbidden_token_in_given_logits_makes_neither_entropy_nor_gradient_nan() -> None:
    logits = torch.tensor([[1.0, -torch.inf, 0.5], [0.2, 0.1, -torch.inf]], requires_grad=True)
    log_probs, entropy, _ = logits_log_probs(logits, torch.tensor([0, 1]), 2.0, entropy_grad=True)
    (log_probs.sum() + entropy.sum()).backward()
    assert torch.isfinite(entropy).all()
    assert torch.isfinite(logits.grad).all()
    first = torch.tensor([1.0, 0.5]) / 2.0
    torch.testing.assert_close(entropy[0], torch.distributions.Categorical(logits=first).entropy())


def test_the_entropy_has_a_gradient_only_when_asked_for() -> None:
    logits, targets = torch.randn(2, 3, requires_grad=True), torch.tensor([0, 1])
    assert logits_log_probs(logits, targets, 2.0, entropy_grad=True)[1].requires_grad
    assert not logits_log_probs(logits, targets, 2.0, entropy_grad=False)[1].requires_grad


PLAIN_LOGITS = {family: family not in ("gemma2",) for family in FAMILIES}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_that_changes_its_logits_afterwards_is_found_out(family: str) -> None:
    model = tiny_model(family, **FAMILIES[family])
    model.set_attn_implementation(PACKED)
    assert hand_out_hidden(model)
    assert logits_are_the_layers(model, model.get_output_embeddings(), torch.device("cpu")) == PLAIN_LOGITS[family]


@pytest.mark.parametrize("changes", [{"logits_scaling": 4.0}, {"logits_scaling": 1.0}])
def test_scaled_logits_are_found_out(changes: dict[str, float]) -> None:
    model = tiny_model("granite", **changes)
    model.set_attn_implementation(PACKED)
    assert hand_out_hidden(model)
    layer = model.get_output_embeddings()
    assert logits_are_the_layers(model, layer, torch.device("cpu")) == (changes["logits_scaling"] == 1.0)


@pytest.mark.parametrize("family", ["llama", "qwen3", "phi", "gpt_neox"])
@pytest.mark.parametrize("entropy_grad", [True, False])
def test_a_model_gives_the_same_numbers_and_gradients_with_and_without_logits(family: str, entropy_grad: bool) -> None:
    """float32: 1e-5 of the largest gradient. qwen3 ties its embeddings, phi's head has a bias."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(2, 32, (1, 11), generator=generator)
    positions = torch.cat([torch.arange(7), torch.arange(4)])[None]
    predict_at = torch.tensor([2, 3, 4, 5, 8, 9])
    targets, weights = ids[0, predict_at + 1], torch.randn(2, 6, generator=generator)
    inputs = {"input_ids": ids, "position_ids": positions, "layout": PackedLayout(torch.tensor([7, 4])), "use_cache": False}

    def run(without_logits: bool) -> tuple[Tensor, Tensor, list[Tensor]]:
        model = tiny_model(family, **FAMILIES[family])
        model.set_attn_implementation(PACKED)
        if without_logits:
            hand_out_hidden(model)
            read = partial(chunked_log_probs, targets, 0.7, entropy_grad)
            log_probs, entropy, _ = model(**inputs, read=read, read_at=predict_at)
        else:
            logits = model(**inputs, logits_to_keep=predict_at).logits[0]
            log_probs, entropy, _ = logits_log_probs(logits, targets, 0.7, entropy_grad)
        assert entropy.requires_grad == entropy_grad
        (weights[0] * log_probs + weights[1] * entropy).sum().backward()
        return log_probs.detach(), entropy.detach(), [p.grad for p in model.parameters()]

    mine, want = run(True), run(False)
    torch.testing.assert_close(mine[0], want[0], atol=1e-5, rtol=0)
    torch.testing.assert_close(mine[1], want[1], atol=1e-5, rtol=0)
    for a, b in zip(mine[2], want[2], strict=True):
        torch.testing.assert_close(a, b, atol=1e-5 * b.abs().max().item() + 1e-7, rtol=0)


def test_the_model_still_gives_logits_to_who_does_not_read() -> None:
    model = tiny_model("llama")
    ids = torch.arange(2, 9)[None]
    before, name = model(input_ids=ids).logits, type(model).__name__
    assert hand_out_hidden(model)
    assert torch.equal(model(input_ids=ids).logits, before)
    assert type(model).__name__ == name


def test_an_output_layer_that_is_not_plain_keeps_its_logits() -> None:
    class Other(nn.Linear):
        pass

    model = tiny_model("llama")
    model.get_output_embeddings().__class__ = Other
    assert not hand_out_hidden(model)
