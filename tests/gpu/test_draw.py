"""The fused sampler: the CPU's rule and random numbers, the exact log-prob, and the bookkeeping of a row."""

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from lockstep.generation.gpu.draw import draw, num_chunks
from lockstep.generation.gpu.rows import NOT_FINITE, RUNNING, STOPPED, TOO_LONG, RowState
from lockstep.workers.rollout.sampling import request_keys, sample, uniforms

VOCABULARY = 151_936
"""Qwen2.5's: 38 chunks, the last one not full."""


def make_rows(count: int, vocabulary: int = VOCABULARY, seed: int = 0, limit: int = 1000) -> RowState:
    rows = RowState.make(count, 4, vocabulary, num_chunks(vocabulary), torch.device("cuda"))
    rows.key[:count] = request_keys(seed, [(3, i, i % 5) for i in range(count)]).cuda()
    rows.limit[:count] = limit
    rows.done[:count] = RUNNING
    return rows


def drawn(rows: RowState, count: int) -> tuple[Tensor, Tensor]:
    return rows.out_tokens[:count, 0].long(), rows.out_log_probs[:count, 0]


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
@pytest.mark.parametrize("vocabulary", [VOCABULARY, 4096, 1000, 32])
def test_tokens_are_the_cpus_and_log_probs_are_exact(temperature, vocabulary):
    """The same token but where the uniform falls within rounding of a border; log-probs within 1e-5 of torch's log_softmax."""
    count = 512
    torch.manual_seed(vocabulary)
    logits = 3 * torch.randn(count, vocabulary)
    rows = make_rows(count, vocabulary)
    rows.inverse_temperature.fill_(1 / (temperature or 1.0))
    rows.greedy.fill_(temperature == 0)
    draw(logits.cuda(), rows, 0)
    tokens, log_probs = (x.cpu() for x in drawn(rows, count))
    uniform = uniforms(rows.key[:count].cpu(), torch.zeros(count, dtype=torch.int64))
    expected, _ = sample(logits, uniform, temperature, -1, 1.0, 0.0, 1.0)
    assert (tokens == expected).float().mean() > (0.99 if temperature else 0.9999)
    want = torch.log_softmax(logits.double() / (temperature or 1.0), -1).gather(1, tokens[:, None])[:, 0]
    assert (log_probs - want).abs().max() < 1e-5


def test_tokens_follow_the_distribution():
    """Chi-square over 40 groups of about equal probability, 65,536 draws; 72.1 is the 99.9 % quantile at 39 degrees of freedom."""
    torch.manual_seed(0)
    count, rounds = 1024, 64
    base = 2 * torch.randn(VOCABULARY, device="cuda")
    probs = base.double().softmax(-1)
    group = (probs.cumsum(0) * 40).clamp(max=39.999).long()
    observed = torch.zeros(40, device="cuda", dtype=torch.float64)
    rows = make_rows(count, seed=5)
    for place in range(rounds):
        rows.generated[:count] = place
        draw(base.expand(count, -1), rows, 0)
        observed += torch.bincount(group[rows.out_tokens[:count, place % 16].long()], minlength=40)
    expected = torch.zeros_like(observed).index_add_(0, group, probs) * count * rounds
    assert ((observed - expected) ** 2 / expected).sum() < 72.1


def test_the_same_key_draws_the_same_token_in_any_batch():
    torch.manual_seed(1)
    logits = torch.randn(300, VOCABULARY, device="cuda")
    rows = make_rows(300)
    draw(logits, rows, 0)
    tokens, log_probs = (x.clone() for x in drawn(rows, 300))
    order = torch.randperm(300, device="cuda")[:17]
    others = make_rows(40)
    others.key[23:40] = rows.key[order]
    draw(logits[order], others, first=23)
    assert torch.equal(others.out_tokens[23:40, 0].long(), tokens[order])
    assert torch.equal(others.out_log_probs[23:40, 0], log_probs[order])


def test_a_token_without_probability_is_never_drawn():
    torch.manual_seed(2)
    count = 2000
    logits = torch.full((VOCABULARY,), -torch.inf, device="cuda")
    possible = torch.randperm(VOCABULARY, device="cuda")[:50]
    logits[possible] = torch.randn(50, device="cuda")
    rows = make_rows(count)
    draw(logits.expand(count, -1), rows, 0)
    tokens, log_probs = drawn(rows, count)
    assert torch.isin(tokens, possible).all()
    assert torch.isfinite(log_probs).all()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_row_whose_logits_are_not_finite_says_so_and_the_others_go_on(bad):
    logits = torch.randn(3, 9000, device="cuda")
    logits[1, 8000] = bad
    rows = make_rows(3, 9000)
    draw(logits, rows, 0)
    assert rows.done[:3].tolist() == [RUNNING, NOT_FINITE, RUNNING]
    assert torch.isfinite(rows.out_log_probs[[0, 2], 0]).all()


def test_a_draw_advances_live_rows_only_and_ends_at_limits_and_stops():
    rows = make_rows(4, 100, limit=5)
    rows.greedy.fill_(1)
    rows.context[:4] = torch.tensor([10, 11, 12, 13])
    rows.generated[:4] = torch.tensor([0, 4, 2, 2])
    rows.done[3] = STOPPED
    rows.stop[7] = 1
    rows.stops[:4] = 1
    logits = torch.zeros(4, 100, device="cuda")
    logits[[0, 1, 2, 3], [5, 6, 7, 8]] = 1.0
    draw(logits, rows, 0)
    assert rows.done[:4].tolist() == [RUNNING, TOO_LONG, STOPPED, STOPPED]
    assert rows.context[:4].tolist() == [11, 12, 13, 13]
    assert rows.generated[:4].tolist() == [1, 5, 3, 2]
    assert rows.token[:4].tolist() == [5, 6, 7, 0]
    assert [rows.out_tokens[i, p].item() for i, p in ((0, 0), (1, 4), (2, 2))] == [5, 6, 7]
