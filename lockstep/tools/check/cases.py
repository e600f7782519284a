"""Small batches for the properties, drawn and shrunk by hypothesis: the smallest one that breaks a property is what is shown."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lockstep.algorithms.aggregation import LOSS_AGG_MODES
from lockstep.errors import MissingExtra
from lockstep.tools.check.subjects import Case, Violation

try:
    from hypothesis import HealthCheck, Phase, Verbosity, given, settings
    from hypothesis import strategies as st
except ImportError as error:
    raise MissingExtra("lockstep check", "hypothesis", "check") from error

_LOSS_TOKENS = ("old_log_prob", "advantages")
_ADVANTAGE_TOKENS = ("token_level_rewards", "values")
_MAX_ROWS = 4
_MAX_WIDTH = 3
_NUM_REWARD_PARTS = 2


@st.composite
def loss_cases(draw: st.DrawFn) -> Case:
    """Draw up to 4 rows of up to 3 tokens, masks with holes, empty rows, log-ratios from 0 to far beyond every clamp."""
    mask = draw(_masks())
    scale = draw(st.sampled_from([1.0, 8.0]))
    tokens = {name: draw(_numbers(mask.shape)) for name in _LOSS_TOKENS}
    tokens["log_prob"] = tokens["old_log_prob"] + scale * draw(_numbers(mask.shape))
    return Case(
        tokens=tokens,
        mask=mask,
        of_rows={"row_keys": torch.arange(len(mask)) * 7 + draw(st.integers(0, 3))},
        mode=draw(st.sampled_from(LOSS_AGG_MODES)),
        order=draw(st.permutations(range(len(mask)))),
        cut=draw(st.integers(0, len(mask))),
    )


@st.composite
def advantage_cases(draw: st.DrawFn) -> Case:
    """Draw up to 4 rows of up to 3 tokens, masks with holes, empty rows, groups of any size, rewards with ties."""
    mask = draw(_masks())
    rows = len(mask)
    tokens = {name: draw(_numbers(mask.shape)) for name in _ADVANTAGE_TOKENS}
    tokens["old_log_probs"] = -draw(_numbers(mask.shape)).abs()
    tokens["ref_log_prob"] = -draw(_numbers(mask.shape)).abs()
    tokens["rollout_is_weights"] = draw(_numbers(mask.shape)).abs()
    of_rows = {
        "group": torch.tensor(draw(st.lists(st.integers(0, 2), min_size=rows, max_size=rows)), dtype=torch.int64),
        "reward_baselines": draw(_numbers((rows,))),
        "reward_parts": draw(_numbers((rows, _NUM_REWARD_PARTS))),
    }
    return Case(tokens=tokens, of_rows=of_rows, mask=mask, order=draw(st.permutations(range(rows))))


@st.composite
def pair_cases(draw: st.DrawFn) -> Case:
    """Draw up to 4 pairs, with log-probs from far below 0 to 0, ties, and lengths of 1 to 3."""
    shape = draw(st.integers(1, _MAX_ROWS)), 2
    scale = draw(st.sampled_from([0.25, 1.0, 300.0]))
    names = ("log_prob", "ref_log_prob", "mismatched_log_prob", "mismatched_ref_log_prob")
    columns = {name: -scale * draw(_numbers(shape)).abs() for name in names}
    columns["length"] = draw(_numbers(shape)).abs().clamp(1, 3).round()
    columns["margin"] = draw(_numbers(shape[:1])).abs()[:, None].expand(shape)
    order = draw(st.permutations(range(shape[0])))
    cut = draw(st.integers(0, shape[0]))
    return Case(tokens=columns, of_rows={}, mask=torch.ones(shape, dtype=torch.bool), order=order, cut=cut)


def smallest_failure(
    strategy: st.SearchStrategy[Any], check: Callable[[Any], None], max_examples: int
) -> tuple[Any, Violation] | None:
    """Return the smallest case found for which `check` raises, with what it raised; None if `max_examples` cases pass.

    An exception of any other kind counts as a violation too. The cases are the same in every run.
    """
    found: list[tuple[Any, Violation]] = []

    @settings(
        max_examples=max_examples,
        deadline=None,
        database=None,
        derandomize=True,
        verbosity=Verbosity.quiet,
        report_multiple_bugs=False,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def run(case: Any) -> None:
        try:
            check(case)
        except Violation as violation:
            found.append((case, violation))
            raise
        except Exception as error:
            raised = Violation(f"it raised {type(error).__name__}: {error}")
            found.append((case, raised))
            raise raised from error

    try:
        run()
    except Violation:
        return found[-1]  # hypothesis ends by running the smallest case once more
    return None


@st.composite
def _masks(draw: st.DrawFn) -> Tensor:
    bits = draw(st.lists(st.booleans(), min_size=_MAX_ROWS * _MAX_WIDTH, max_size=_MAX_ROWS * _MAX_WIDTH))
    rows = draw(st.integers(1, _MAX_ROWS))
    width = draw(st.integers(1, _MAX_WIDTH))
    return _top_left(torch.tensor(bits), (rows, width)).logical_not()  # shrinks to all selected


def _numbers(shape: tuple[int, ...] | torch.Size) -> st.SearchStrategy[Tensor]:
    """Return quarters from -3 to 3: readable, with ties, and shrinking to 0."""
    # Always as many as the largest batch needs: a smaller batch then keeps the numbers it has, which makes shrinking work.
    size = _MAX_ROWS * _MAX_WIDTH
    numbers = st.lists(st.integers(-12, 12), min_size=size, max_size=size)
    return numbers.map(lambda values: _top_left(torch.tensor(values, dtype=torch.float64) / 4, tuple(shape)))


def _top_left(values: Tensor, shape: tuple[int, ...]) -> Tensor:
    table = values.reshape(_MAX_ROWS, _MAX_WIDTH)
    return table[: shape[0], 0] if len(shape) == 1 else table[: shape[0], : shape[1]]
