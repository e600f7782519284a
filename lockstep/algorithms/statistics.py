"""How sure a measured share is."""

from __future__ import annotations

import math

Z_95 = 1.959963984540054


def wilson_interval(share: float, count: int, z: float = Z_95) -> tuple[float, float]:
    """The Wilson interval of a share of `count` independent trials: 95 % with the default z. (0, 1) without trials.

    Unlike share +- z * standard error it stays in [0, 1] and holds for few trials and for shares near 0 and 1 (Wilson 1927).
    """
    if not count:
        return 0.0, 1.0
    centre = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    return max(0.0, centre - half), min(1.0, centre + half)
