import pytest
import torch
from helpers.flat import aggregate, count
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.algorithms.aggregation import LOSS_AGG_MODES, Denominators
from lockstep.errors import ConfigError

PROPERTY = settings(max_examples=30, deadline=None)
SCALE = 7.0


def slow_agg(loss, mask, mode):
    row_sums, row_means, tokens, sequences = [], [], 0, 0
    for row, selected in zip(loss.tolist(), mask.tolist(), strict=True):
        kept = [v for v, m in zip(row, selected, strict=True) if m]
        row_sums.append(sum(kept))
        row_means.append(sum(kept) / len(kept) if kept else 0.0)
        tokens += len(kept)
        sequences += bool(kept)
    tokens, sequences = max(tokens, 1), max(sequences, 1)
    return {
        "token-mean": sum(row_sums) / tokens,
        "token-sum": sum(row_sums),
        "seq-mean-token-sum": sum(row_sums) / sequences,
        "seq-mean-token-mean": sum(row_means) / sequences,
        "seq-mean-token-sum-norm": sum(row_sums) / sequences / SCALE,
    }[mode]


def value_and_gradient(loss, mask, mode, denominators):
    loss = loss.clone().requires_grad_()
    total = aggregate(loss, mask, mode, denominators, SCALE)
    total.backward()
    return total.item(), loss.grad


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@PROPERTY
@given(data=st.data())
def test_each_mode_equals_its_formula(mode, data, masks, numbers):
    mask = data.draw(masks)
    loss = data.draw(numbers(mask))
    actual = aggregate(loss, mask, mode, count(mask), SCALE).item()
    assert actual == pytest.approx(slow_agg(loss, mask, mode), rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@PROPERTY
@given(data=st.data())
def test_any_split_of_the_rows_adds_up_to_the_whole(mode, data, masks, numbers):
    mask = data.draw(masks)
    loss = data.draw(numbers(mask))
    part_of_row = torch.tensor(data.draw(st.lists(st.integers(0, 2), min_size=len(mask), max_size=len(mask))))
    denominators = count(mask)
    whole, whole_gradient = value_and_gradient(loss, mask, mode, denominators)

    total, gradient = 0.0, torch.full_like(loss, torch.nan)
    for part in range(3):
        rows = part_of_row == part
        value, gradient[rows] = value_and_gradient(loss[rows], mask[rows], mode, denominators)
        total += value
    assert total == pytest.approx(whole, rel=1e-12, abs=1e-12)
    torch.testing.assert_close(gradient, whole_gradient, rtol=1e-12, atol=0)
    assert not gradient[~mask].any()


def test_denominators_count_written_tokens_and_the_rows_that_have_one():
    mask = torch.tensor([[1, 0, 1], [0, 0, 0], [0, 1, 0]])
    assert count(mask) == Denominators(tokens=3, sequences=2)


def test_an_unknown_mode_names_the_known_ones():
    one = torch.ones(1, 1)
    with pytest.raises(ConfigError, match="'token_mean'; did you mean 'token-mean'") as caught:
        aggregate(one, one, "token_mean", count(one))
    assert all(mode in str(caught.value) for mode in LOSS_AGG_MODES)


@pytest.mark.parametrize("factor", [None, 0.0, -1.0, float("nan")])
def test_the_normalised_mode_requires_a_positive_scale(factor):
    one = torch.ones(1, 1)
    with pytest.raises(ConfigError, match="loss_scale_factor"):
        aggregate(one, one, "seq-mean-token-sum-norm", count(one), factor)
