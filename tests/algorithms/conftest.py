"""Hypothesis strategies that the tests of this folder draw from (session fixtures, so that `@given` accepts them)."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor


@pytest.fixture(scope="session")
def masks() -> st.SearchStrategy[Tensor]:
    """Bool masks [B, T]: plain prefixes, several turns, empty rows, single tokens, no columns at all."""

    def of_width(width: int) -> st.SearchStrategy[Tensor]:
        prefix = st.integers(0, width).map(lambda n: [t < n for t in range(width)])
        turns = st.lists(st.booleans(), min_size=width, max_size=width)
        rows = st.lists(prefix | turns, min_size=1, max_size=6)
        return rows.map(lambda r: torch.tensor(r, dtype=torch.bool).reshape(len(r), width))

    return st.integers(0, 7).flatmap(of_width)


@pytest.fixture(scope="session")
def numbers() -> Callable[[Tensor], st.SearchStrategy[Tensor]]:
    """numbers(mask): float64 tensors of the mask's shape, tiny to large, with NaN or inf wherever the mask is 0."""

    def like(mask: Tensor) -> st.SearchStrategy[Tensor]:
        def build(seed: int, scale: float, garbage: float) -> Tensor:
            values = torch.randn(mask.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
            return torch.where(mask, scale * values, garbage)

        garbage = st.sampled_from([float("nan"), float("inf"), -float("inf")])
        return st.builds(build, st.integers(0, 2**32), st.sampled_from([0.01, 0.3, 3.0, 30.0]), garbage)

    return like
