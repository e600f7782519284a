"""How sure a measured share is."""

from __future__ import annotations

import math

Z_95 = 1.959964
"""A normal variable lies within so many standard deviations with probability 0.95."""


def wilson_interval(right: float, count: int) -> tuple[float, float]:
    """The 95 % interval (Wilson, 1927) of a probability of which `right` of `count` trials came out; (0, 1) without trials.

    Unlike mean +- 1.96 standard errors it stays within 0 and 1, and has a width where all or none came out.
    """
    if not count:
        return 0.0, 1.0
    share, square = right / count, Z_95**2 / count
    centre = (share + square / 2) / (1 + square)
    half = math.sqrt(share * (1 - share) * square + square**2 / 4) / (1 + square)
    return max(0.0, centre - half), min(1.0, centre + half)
