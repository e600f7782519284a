"""What DAPO does to scores and groups before advantages are computed (Yu et al., arXiv 2503.14476)."""

import torch
from torch import Tensor


def overlong_penalty(lengths: Tensor, max_length: int, buffer: int, factor: float) -> Tensor:
    """What a response of each length [B] loses for coming close to the limit; float64 [B], at most 0.

    ```text
    penalty = -factor * clamp((length - (max_length - buffer)) / buffer, 0, 1)
    ```
    """
    return -factor * ((lengths.double() - (max_length - buffer)) / buffer).clamp(0, 1)


def has_signal(values: Tensor, group: Tensor, counted: Tensor) -> Tensor:
    """bool [B]: whether the row's group holds at least two different values [B] among its counted rows [B].

    A group without that gives every estimator that compares samples an advantage of 0 for all of its rows.
    """
    groups, place = torch.unique(group, return_inverse=True)
    lowest = torch.full((len(groups),), -torch.inf, dtype=torch.float64)
    largest, negated = (lowest.scatter_reduce(0, place[counted], x[counted], "amax") for x in (values.double(), -values.double()))
    return (largest > -negated)[place]
