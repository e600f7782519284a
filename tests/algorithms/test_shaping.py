import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.algorithms.shaping import has_signal, overlong_penalty


def test_the_penalty_grows_over_the_buffer_and_not_beyond_the_factor():
    lengths = torch.tensor([0, 80, 81, 90, 100, 120])
    expected = [0.0, 0.0, -0.025, -0.25, -0.5, -0.5]
    assert torch.allclose(overlong_penalty(lengths, max_length=100, buffer=20, factor=0.5), torch.tensor(expected).double())


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from([0.0, 0.1 + 0.2, 0.3, 1.0]), st.booleans()), max_size=12))
def test_a_group_has_a_signal_when_two_of_its_counted_values_differ(rows):
    group, values, counted = (torch.tensor([row[i] for row in rows], dtype=torch.float64) for i in range(3))
    expected = [len({v for g, v, c in rows if c and g == mine}) > 1 for mine, _, _ in rows]
    assert has_signal(values, group.long(), counted.bool()).tolist() == expected
