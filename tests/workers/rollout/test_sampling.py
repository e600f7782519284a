import math
import random

import pytest
import torch
from helpers.kept import check_kept, draw_options, odd_rows
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lockstep.workers.rollout import sampling
from lockstep.workers.rollout.sampling import _mix, request_key, request_keys, uniforms


@given(st.integers(-(2**63), 2**63 - 1), st.tuples(*[st.integers(-(2**63), 2**63 - 1)] * 3))
def test_a_key_is_what_wrapping_arithmetic_says(seed: int, key: tuple[int, int, int]) -> None:
    golden = torch.tensor(0x9E3779B97F4A7C15 - 2**64)
    state = torch.tensor(seed)
    for part in key:
        state = _mix(state + golden) ^ torch.tensor(part)
    assert request_key(seed, key) == int(_mix(state + golden)) == int(request_keys(seed, [key])[0])


def test_uniforms_look_independent_and_uniform() -> None:
    """4-sigma bounds for 400 requests of 100 positions, over prompts, samples, steps, seeds and positions alike."""
    n = 40_000
    for keys in (
        [(0, i, 0) for i in range(400)],
        [(0, 0, i) for i in range(400)],
        [(i, 3, 1) for i in range(400)],
    ):
        grid = torch.stack([uniforms(request_keys(1, keys), torch.full((400,), t)) for t in range(100)], 1).double()
        assert grid.min() >= 0
        assert grid.max() < 1
        assert abs(grid.mean() - 0.5) < 4 * (1 / 12 / n) ** 0.5
        assert abs(grid.var() - 1 / 12) < 4 * (1 / 180 / n) ** 0.5
        centred = (grid - 0.5) * 12**0.5
        for neighbours in (centred[1:] * centred[:-1], centred[:, 1:] * centred[:, :-1]):
            assert abs(neighbours.mean()) < 4 / neighbours.numel() ** 0.5
        other_seed = torch.stack([uniforms(request_keys(2, keys), torch.full((400,), t)) for t in range(100)], 1).double()
        assert abs((centred * (other_seed - 0.5) * 12**0.5).mean()) < 4 / n**0.5
        assert len(grid.unique()) > 0.99 * n


@given(st.lists(st.tuples(*[st.integers(0, 2**31)] * 3), min_size=1, max_size=8), st.randoms(use_true_random=False))
def test_a_uniform_does_not_depend_on_the_batch(keys: list[tuple[int, int, int]], rng: object) -> None:
    positions = torch.arange(len(keys))
    together = uniforms(request_keys(5, keys), positions)
    order = list(range(len(keys)))
    rng.shuffle(order)  # type: ignore[attr-defined]
    shuffled = uniforms(request_keys(5, [keys[i] for i in order]), positions[order])
    assert torch.equal(shuffled, together[order])
    assert torch.equal(uniforms(request_keys(5, keys[:1]), positions[:1]), together[:1])


LAST_UNIFORM = 1.0 - 2.0**-24
"""The largest number that `uniforms` returns."""


def sample(
    logits: Tensor,
    uniform: Tensor,
    temperature: float,
    top_k: int = -1,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    history: list[Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """`sampling.sample`, without filters unless they are given."""
    return sampling.sample(logits, uniform, temperature, top_k, top_p, min_p, repetition_penalty, history)


def draw(logits: Tensor, count: int, **options: float) -> Tensor:
    """`count` tokens from one row of logits, with the uniforms of `count` different requests."""
    keys = request_keys(11, [(0, i, 0) for i in range(count)])
    uniform = uniforms(keys, torch.zeros(count, dtype=torch.int64))
    return sample(logits.expand(count, -1), uniform, **{"temperature": 1.0} | options)[0]  # type: ignore[arg-type]


def test_tokens_follow_the_distribution() -> None:
    """Chi-square over 7 tokens, one of them impossible: 5 degrees of freedom, whose 99.9 % quantile is 20.5. The seed is fixed."""
    logits = torch.tensor([2.0, -1.0, 0.5, -torch.inf, 1.0, -3.0, 0.0])
    count, temperature = 40_000, 0.8
    counts = torch.bincount(draw(logits, count, temperature=temperature), minlength=7).double()
    expected = count * torch.softmax(logits.double() / temperature, -1)
    possible = expected > 0
    assert counts[3] == 0
    assert (((counts - expected) ** 2)[possible] / expected[possible]).sum() < 20.5


@settings(max_examples=60)
@given(
    seed=st.integers(0, 10_000),
    top_k=st.sampled_from([-1, 1, 3, 9, 20]),
    top_p=st.sampled_from([0.0, 0.3, 0.9, 1.0]),
)
def test_top_k_and_top_p_keep_exactly_the_right_tokens(seed: int, top_k: int, top_p: float) -> None:
    """A fine comb of uniforms finds every token that can be drawn; a loop over the sorted tokens says which those are."""
    logits = torch.randn(9, generator=torch.Generator().manual_seed(seed))
    comb = torch.linspace(0, LAST_UNIFORM, 4001)
    tokens, log_probs = sample(logits.expand(len(comb), -1), comb, 1.0, top_k, top_p)

    order = logits.sort(descending=True).indices.tolist()[: top_k if top_k > 0 else None]
    among = torch.softmax(logits[order].double(), -1).tolist()
    kept, held = set(), 0.0
    for token, prob in zip(order, among, strict=True):
        if not kept or held < top_p:
            kept.add(token)
        held += prob
    share = torch.zeros(9, dtype=torch.float64)
    share[list(kept)] = torch.softmax(logits[list(kept)].double(), -1)
    counted = torch.bincount(tokens, minlength=9).double() / len(comb)
    assert set(tokens.tolist()) <= kept
    torch.testing.assert_close(counted, share, atol=1e-3, rtol=0)
    # The log-prob is that of the whole distribution, whatever was kept.
    torch.testing.assert_close(log_probs, torch.log_softmax(logits, -1)[tokens], atol=1e-6, rtol=0)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000), vocabulary=st.sampled_from([1, 2, 7, 300]))
def test_what_is_kept_is_what_a_whole_sort_in_float64_keeps(seed: int, vocabulary: int) -> None:
    """Every odd row, with parameters of its own and with the same for all."""
    rng = random.Random(seed)
    rows = list(odd_rows(vocabulary, seed).values())
    options = [draw_options(rng, vocabulary) for _ in rows]
    columns = [torch.tensor(column)[:, None] for column in zip(*options, strict=True)]
    for row, kept, own in zip(rows, sampling.keep_likely(torch.stack(rows), *columns), options, strict=True):
        check_kept(kept > -torch.inf, row, *own)
    for row, kept in zip(rows, sampling.keep_likely(torch.stack(rows), *options[0]), strict=True):
        check_kept(kept > -torch.inf, row, *options[0])


def test_equally_likely_tokens_stay_together() -> None:
    logits = torch.tensor([[1.0, 2.0, 1.0, 0.0, 1.0]])
    for options in ((2, 1.0, 0.0), (-1, 0.5, 0.0)):
        assert (sampling.keep_likely(logits, *options) > -torch.inf).tolist() == [[True, True, True, False, True]]


def test_a_token_without_probability_is_never_drawn_at_either_end() -> None:
    low = -torch.inf
    logits = torch.tensor([[low, 0.0, low, 0.1, low], [0.3, low, low, low, low], [low, low, low, low, 0.0]])
    for u in (0.0, 2.0**-24, 0.5, LAST_UNIFORM):
        tokens, log_probs = sample(logits, torch.full((3,), u), 1.0)
        assert torch.isfinite(log_probs).all()
        assert tokens[1:].tolist() == [0, 4]
        assert tokens[0] in (1, 3)


@pytest.mark.parametrize("top_p", [1.0, 0.999])
def test_a_long_tail_of_impossible_tokens_is_never_reached(top_p: float) -> None:
    """Rounding in a sum over many tokens must not push the threshold past the last possible one."""
    logits = torch.full((1, 50_000), -torch.inf)
    logits[0, :30_000] = torch.randn(30_000, generator=torch.Generator().manual_seed(0))
    tokens, log_probs = sample(logits, torch.tensor([LAST_UNIFORM]), 1.0, -1, top_p)
    assert tokens.item() < 30_000
    assert torch.isfinite(log_probs).all()


def test_temperature_zero_takes_the_most_likely_token_with_its_log_prob_at_one() -> None:
    logits = torch.randn(20, 13, generator=torch.Generator().manual_seed(1))
    tokens, log_probs = sample(logits, torch.full((20,), 0.99), 0.0)
    assert torch.equal(tokens, logits.argmax(-1))
    torch.testing.assert_close(log_probs, torch.log_softmax(logits, -1).max(-1).values)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_give_no_finite_log_prob(bad: float, temperature: float) -> None:
    """So the caller can tell; the other rows are not touched."""
    logits = torch.zeros(2, 5)
    logits[0, 2] = bad
    tokens, log_probs = sample(logits, torch.tensor([0.7, 0.7]), temperature)
    assert not torch.isfinite(log_probs[0])
    assert torch.isfinite(log_probs[1])
    assert (tokens < 5).all()


def share_of(logits: Tensor, options: dict[str, float], history: list[int]) -> Tensor:
    """What is left of the distribution, written out token by token in float64."""
    penalty, temperature = options.get("repetition_penalty", 1.0), options["temperature"]
    scores = [x / temperature for x in logits.double().tolist()]
    scores = [(x / penalty if x > 0 else x * penalty) if i in history else x for i, x in enumerate(scores)]
    order = sorted(range(len(scores)), key=lambda i: -scores[i])
    order = order[: int(options["top_k"])] if options.get("top_k", -1) > 0 else order
    total = sum(math.exp(scores[i]) for i in order)
    kept, held = [], 0.0
    for i in order:
        if not kept or held < options.get("top_p", 1.0):
            kept.append(i)
        held += math.exp(scores[i]) / total
    kept = [i for i in kept if scores[i] >= scores[order[0]] + math.log(options.get("min_p", 0.0) or 1e-300)]
    share = torch.zeros(len(scores), dtype=torch.float64)
    for i in kept:
        share[i] = math.exp(scores[i])
    return share / share.sum()


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1.0},
        {"temperature": 0.5},
        {"temperature": 2.0, "top_k": 5},
        {"temperature": 1.0, "top_p": 0.8},
        {"temperature": 1.0, "min_p": 0.15},
        {"temperature": 0.9, "repetition_penalty": 1.8},
        {"temperature": 1.3, "top_k": 9, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.3},
    ],
    ids=str,
)
def test_tokens_follow_the_distribution_under_every_option(options: dict[str, float]) -> None:
    """Chi-square over 400 tokens (more than one chunk), those with less than 5 expected draws put together; 99.9 % quantile by
    Wilson and Hilferty. The seed is fixed. The log-prob stays that of the whole distribution at the temperature."""
    logits = torch.randn(400, generator=torch.Generator().manual_seed(5)) * 2.5
    count, history = 20_000, [3, 3, 17, 200, int(logits.argmax())]
    uniform = uniforms(request_keys(1, [(0, i, 0) for i in range(count)]), torch.zeros(count, dtype=torch.int64))
    counts = torch.zeros(400, dtype=torch.float64)
    for part in uniform.split(5_000):
        rows = logits.expand(len(part), -1)
        seen = [torch.tensor(history)] * len(part) if "repetition_penalty" in options else None
        tokens, log_probs = sample(rows, part, **options, history=seen)  # type: ignore[arg-type]
        counts += torch.bincount(tokens, minlength=400)
        whole = torch.log_softmax(logits.double() / options["temperature"], -1)[tokens]
        torch.testing.assert_close(log_probs.double(), whole, atol=2e-5, rtol=0)
    expected = count * share_of(logits, options, history)
    assert counts[expected == 0].sum() == 0
    often = expected >= 5
    observed = torch.cat([counts[often], counts[~often].sum()[None]])
    expected = torch.cat([expected[often], expected[~often].sum()[None]])
    observed, expected = observed[expected > 0], expected[expected > 0]
    degrees = len(expected) - 1
    quantile = degrees * (1 - 2 / (9 * degrees) + 3.09 * (2 / (9 * degrees)) ** 0.5) ** 3
    assert ((observed - expected) ** 2 / expected).sum() < quantile


def test_a_repetition_penalty_can_change_the_most_likely_token() -> None:
    logits = torch.tensor([[2.0, 1.5, -1.0], [2.0, 1.5, -1.0]])
    history = [torch.tensor([0, 0]), torch.tensor([1])]
    tokens, log_probs = sample(logits, torch.zeros(2), 0.0, repetition_penalty=1.5, history=history)
    assert tokens.tolist() == [1, 0]
    torch.testing.assert_close(log_probs, torch.log_softmax(logits, -1)[[0, 1], [1, 0]])
