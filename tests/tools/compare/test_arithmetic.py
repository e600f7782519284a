"""Every number against the plain formula on the flattened tensors."""

import pytest
import torch

from lockstep.protocol import Ragged
from lockstep.tools.compare import arithmetic


def gradients(count=3):
    generator = torch.Generator().manual_seed(0)
    return [{"a": torch.randn(3, 4, generator=generator), "b": torch.randn(5, generator=generator)} for _ in range(count)]


def ragged(block):
    """Rows of all their columns, and one more row without tokens."""
    return Ragged.from_rows([*block, []], dtype=block.dtype)


def flat(gradient):
    return torch.cat([tensor.flatten() for tensor in gradient.values()]).double()


def test_cosines_are_those_of_the_flattened_gradients():
    several = gradients()
    expected = torch.nn.functional.normalize(torch.stack([flat(g) for g in several]), dim=1)
    found = arithmetic.cosines(arithmetic.dots(several))
    torch.testing.assert_close(torch.tensor(found, dtype=torch.float64), expected @ expected.T, rtol=0, atol=1e-12)


def test_a_gradient_of_zero_has_no_direction():
    one, two = gradients(2)
    zero = {name: torch.zeros_like(tensor) for name, tensor in one.items()}
    (a, b, none), *_, last = arithmetic.cosines(arithmetic.dots([one, two, zero]))
    assert a == pytest.approx(1)
    assert b is not None
    assert none is None
    assert last == [None, None, None]


def test_gradients_of_different_parameters_are_not_compared():
    one, two = gradients(2)
    with pytest.raises(ValueError, match="'c'"):
        arithmetic.dot(one, {"a": two["a"], "c": two["b"]})


@pytest.mark.parametrize(
    ("weights", "share"), [([2.0, 2, 2, 2], 1.0), ([0.0, 5, 0, 0], 0.25), ([1.0, 3], 16 / 20), ([0.0, 0], None)]
)
def test_the_effective_share_is_that_of_kish(weights, share):
    assert arithmetic.effective_share(torch.tensor(weights)) == (share if share is None else pytest.approx(share))
    assert arithmetic.effective_share(7 * torch.tensor(weights)) == (share if share is None else pytest.approx(share))


def test_the_strongest_are_the_peaks_of_the_rows_in_order():
    pushes = torch.randn(9, 5, generator=torch.Generator().manual_seed(1))
    pushes[4] = 0.0
    for sign, found in zip((1, -1), arithmetic.strongest(ragged(pushes), 4), strict=True):
        peaks = sorted(((sign * pushes[r]).max().item(), -r) for r in range(9))[::-1]
        expected = [(-r, int((sign * pushes[-r]).argmax())) for value, r in peaks if value > 0][:4]
        assert found == expected
    assert arithmetic.strongest(ragged(torch.zeros(2, 3)), 4) == ([], [])


def test_windows_are_in_different_rows_and_serve_each_algorithm_in_turn():
    first, second = torch.zeros(4, 3), torch.zeros(4, 3)
    first[0, 2], first[1, 0] = -9.0, 1.0
    second[3, 1], second[0, 0] = 0.1, -0.05
    assert arithmetic.windows([ragged(first), ragged(second)], 4) == [(0, 2), (3, 1), (1, 0)]
    assert arithmetic.windows([ragged(first), ragged(second)], 2) == [(0, 2), (3, 1)]
    assert arithmetic.windows([ragged(torch.zeros(4, 3))], 2) == []
