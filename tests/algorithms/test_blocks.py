"""The adapter around functions of padded blocks."""

import pytest
import torch

from lockstep.algorithms.binding import on_blocks
from lockstep.algorithms.rows import Rows
from lockstep.errors import ConfigError

ROWS = Rows(torch.tensor([2, 0, 1]))
TOKENS = torch.tensor([1.0, 2.0, 3.0])


def test_tokens_come_as_blocks_what_belongs_to_rows_as_it_is_and_results_are_flat():
    def function(*, values, group, gamma):
        assert values.tolist() == [[1.0, 2.0], [0.0, 0.0], [3.0, 0.0]]
        assert group.tolist() == [5, 6, 7]  # as many rows as tokens
        return values * gamma, {"group": group[:, None].expand(values.shape)}

    first, named = on_blocks("f", function)(rows=ROWS, values=TOKENS, group=torch.tensor([5, 6, 7]), gamma=2.0)
    assert first.tolist() == [2.0, 4.0, 6.0]
    assert named["group"].tolist() == [5, 5, 7]


def test_the_gradient_goes_through_the_block():
    tokens = TOKENS.clone().requires_grad_()
    (result,) = on_blocks("f", lambda *, x: (x * x.cumsum(1).detach(),))(rows=ROWS, x=tokens)
    result.sum().backward()
    assert tokens.grad.tolist() == [1.0, 3.0, 3.0]


@pytest.mark.parametrize(
    ("wrong", "got"), [(lambda x: x.sum(), r"shape \(\)"), (lambda x: x[:, :1], r"shape \(3, 1\)"), (lambda x: 1.0, "float")]
)
def test_a_result_that_is_not_per_token_is_an_error_that_names_the_function(wrong, got):
    with pytest.raises(ConfigError, match=rf"^my loss must return one number per token, \(3, 2\).*{got}"):
        on_blocks("my loss", lambda *, x: (wrong(x), {}))(rows=ROWS, x=TOKENS)


def test_no_rows_are_blocks_too():
    empty = Rows(torch.zeros(0, dtype=torch.int64))
    assert on_blocks("f", lambda *, x: x)(rows=empty, x=torch.zeros(0)).shape == (0,)
