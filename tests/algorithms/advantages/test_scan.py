"""Returns by doubling against the recursion over tokens."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.algorithms.advantages import gae
from lockstep.algorithms.advantages.scan import gae_returns, scan
from lockstep.algorithms.rows import Rows

PROPERTY = settings(max_examples=60, deadline=None)


@PROPERTY
@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(any),
    seed=st.integers(0, 999),
    gamma=st.sampled_from([0.0, 0.9, 1.0]),
    lam=st.sampled_from([0.0, 0.95, 1.0]),
)
def test_returns_are_those_of_gae(lengths, seed, gamma, lam):
    """To 1e-12 in float64, with masks that leave out tokens anywhere, and whole rows."""
    torch.manual_seed(seed)
    rows = Rows(torch.tensor(lengths))
    rewards, values = torch.randn(2, rows.num_tokens, dtype=torch.float64)
    mask = torch.rand(rows.num_tokens) < 0.7
    _, want = gae(token_level_rewards=rewards, response_mask=mask, rows=rows, values=values, gamma=gamma, lam=lam)
    found = gae_returns(rewards, values, mask, rows, gamma, lam)
    torch.testing.assert_close(found, want, rtol=1e-12, atol=1e-12)


def test_what_is_outside_the_mask_is_not_read():
    rows, mask = Rows(torch.tensor([3, 2])), torch.tensor([True, False, True, False, True])
    rewards = torch.tensor([0.0, torch.nan, 1.0, torch.inf, 2.0])
    values = torch.tensor([0.5, torch.nan, 0.25, torch.nan, 1.0])
    # As in test_gae: the first token's advantage is -0.1875.
    assert gae_returns(rewards, values, mask, rows, 0.5, 0.5).tolist() == [0.3125, 0.0, 1.0, 0.0, 2.0]


def test_float32_keeps_its_precision_over_long_rows():
    """A sum over 5,000 tokens, to 1e-5 of the largest."""
    torch.manual_seed(0)
    x, factor = torch.randn(10_000, dtype=torch.float64), torch.full((10_000,), 1 - 2**-10, dtype=torch.float64)
    factor[[4999, 9999]] = 0.0
    want = scan(x, factor, 5000)
    assert (scan(x.float(), factor.float(), 5000) - want).abs().max() < 1e-5 * want.abs().max()
