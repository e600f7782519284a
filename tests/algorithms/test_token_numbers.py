import torch

from lockstep.algorithms.rows import Rows
from lockstep.algorithms.token_numbers import token_numbers


def test_a_number_depends_on_the_key_and_the_position_alone():
    keys = torch.tensor([5, -3, 2**40])
    lengths = torch.tensor([6, 0, 4])
    numbers = token_numbers(keys, Rows(lengths))
    assert numbers.dtype == torch.int64
    other = token_numbers(keys.flip(0), Rows(torch.tensor([9, 9, 9]))).view(3, 9).flip(0)
    assert torch.cat([row[:length] for row, length in zip(other, lengths.tolist(), strict=True)]).equal(numbers)
    assert len(numbers.unique()) == numbers.numel()


def test_numbers_are_spread_evenly():
    high = (token_numbers(torch.arange(1000), Rows(torch.full((1000,), 8))) > 0).double().view(1000, 8)
    # 8000 fair bits: six standard deviations are 0.034.
    assert abs(high.mean() - 0.5) < 0.034
    assert (high.mean(0) - 0.5).abs().max() < 0.1
