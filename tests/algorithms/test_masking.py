import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.algorithms.masking import masked_mean, masked_sum, masked_var, masked_whiten, zero_outside

PROPERTY = settings(max_examples=40, deadline=None)


def close(actual, expected):
    torch.testing.assert_close(actual, torch.as_tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-12)


def selected(x, mask):
    return [v for v, m in zip(x.flatten().tolist(), mask.flatten().tolist(), strict=True) if m]


def slow_mean(values):
    return math.fsum(values) / len(values) if values else 0.0


def slow_var(values, divisor):
    mean = slow_mean(values)
    return math.fsum((v - mean) ** 2 for v in values) / divisor if divisor > 0 else 0.0


@PROPERTY
@given(data=st.data())
def test_statistics_equal_those_of_the_selected_entries(data, masks, numbers):
    mask = data.draw(masks)
    x = data.draw(numbers(mask))
    values = selected(x, mask)
    rows = [selected(r, m) for r, m in zip(x, mask, strict=True)]
    close(masked_sum(x, mask), math.fsum(values))
    close(masked_sum(x, mask, dim=-1), [math.fsum(r) for r in rows])
    close(masked_mean(x, mask), slow_mean(values))
    close(masked_mean(x, mask, dim=1), [slow_mean(r) for r in rows])
    close(masked_var(x, mask), slow_var(values, len(values) - 1))


@PROPERTY
@given(data=st.data(), shift_mean=st.booleans())
def test_whitening_equals_the_formula_and_is_zero_outside(data, shift_mean, masks, numbers):
    mask = data.draw(masks)
    x = data.draw(numbers(mask))
    values = selected(x, mask)
    expected = torch.zeros_like(x)
    for i, t in mask.nonzero().tolist():
        v = x[i, t].item()
        if len(values) >= 2:
            mean = slow_mean(values)
            v = (v - mean) / math.sqrt(slow_var(values, len(values) - 1) + 1e-8) + (0 if shift_mean else mean)
        expected[i, t] = v
    close(masked_whiten(x, mask, shift_mean), expected)


@pytest.mark.parametrize("function", [masked_sum, masked_mean, masked_var, lambda x, m: masked_whiten(x, m)[0, 0]])
def test_garbage_outside_the_mask_reaches_no_gradient(function):
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    gradients = []
    for garbage in (0.0, math.nan, math.inf):
        x = torch.tensor([[1.0, 4.0, garbage], [2.0, garbage, garbage]], dtype=torch.float64, requires_grad=True)
        function(x, mask).backward()
        gradients.append(x.grad)
    assert gradients[0].abs().sum() > 0
    torch.testing.assert_close(gradients[1], gradients[0], rtol=0, atol=0)
    torch.testing.assert_close(gradients[2], gradients[0], rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
def test_any_mask_dtype_selects_the_same(dtype):
    assert zero_outside(torch.tensor([5.0, 6.0]), torch.tensor([0, 1]).to(dtype)).tolist() == [0.0, 6.0]


def test_a_mask_of_another_shape_is_refused_instead_of_broadcast():
    with pytest.raises(ValueError, match=r"\(2, 3\), not \(2, 1\)"):
        masked_mean(torch.ones(2, 3), torch.ones(2, 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_whitening_equal_numbers_gives_zero(dtype):
    # The mean of seven times 0.1 is not 0.1, and its error would be divided by the root of the floor, 1e-4.
    assert masked_whiten(torch.full((7,), 0.1, dtype=dtype), torch.ones(7)).abs().max() < 1e-9
