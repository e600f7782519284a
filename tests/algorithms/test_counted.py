import torch

from lockstep.algorithms.counted import token_numbers


def test_a_number_depends_on_the_key_and_the_position_alone():
    keys = torch.tensor([5, -3, 2**40])
    numbers = token_numbers(keys, 6)
    assert numbers.dtype == torch.int64
    assert token_numbers(keys.flip(0), 9)[:, :6].equal(numbers.flip(0))
    assert len(numbers.unique()) == numbers.numel()


def test_numbers_are_spread_evenly():
    high = (token_numbers(torch.arange(1000), 8) > 0).double()
    # 8000 fair bits: six standard deviations are 0.034.
    assert abs(high.mean() - 0.5) < 0.034
    assert (high.mean(0) - 0.5).abs().max() < 0.1
