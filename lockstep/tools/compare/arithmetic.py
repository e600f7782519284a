"""The numbers of a comparison: tensors in, numbers out.

A *push* is -d loss / d log_prob of a token: how much a small step down the loss raises its log-prob, were it free to move alone. It is the
advantage times everything the loss does with it: ratio, clip, weight, aggregation.
"""

import itertools
import math
from collections.abc import Mapping, Sequence

from torch import Tensor

from lockstep.protocol import Ragged

Gradient = Mapping[str, Tensor]
"""Parameter -> its gradient."""


def dot(a: Gradient, b: Gradient) -> float:
    """The inner product of two gradients over the same parameters, added up in float64. Raises ValueError when they differ in names."""
    if a.keys() != b.keys():
        raise ValueError(f"gradients of different parameters: {sorted(a.keys() ^ b.keys())[:4]} are in one only")
    return sum(float((a[name].double() * b[name].double()).sum()) for name in a)


def dots(gradients: Sequence[Gradient]) -> list[list[float]]:
    """The inner products of all pairs [K][K]."""
    table = [[0.0] * len(gradients) for _ in gradients]
    for i, a in enumerate(gradients):
        for j, b in enumerate(gradients[: i + 1]):
            table[i][j] = table[j][i] = dot(a, b)
    return table


def cosines(products: Sequence[Sequence[float]]) -> list[list[float | None]]:
    """products[i][j] / (|i| |j|) from the inner products [K][K]; None where one of the two gradients is zero and has no direction."""
    norms = [math.sqrt(row[i]) for i, row in enumerate(products)]
    return [
        [value / (norms[i] * norms[j]) if norms[i] and norms[j] else None for j, value in enumerate(row)]
        for i, row in enumerate(products)
    ]


def effective_share(weights: Tensor) -> float | None:
    """(sum w)^2 / (n sum w^2) of n weights of at least 0: 1 when all are equal, 1/n when one has everything, None when all are 0."""
    w = weights.double().flatten()
    squares = float(w.square().sum())
    return float(w.sum().square()) / (len(w) * squares) if squares > 0 else None


def strongest(pushes: Ragged, count: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """The (row, position) of at most `count` tokens that are pushed most up, and most down; strongest first.

    At most one token per row: where the advantage is that of the whole row, a list of tokens would be a list of neighbours. Only tokens
    that are pushed that way count. Equal pushes come in the order of rows and positions.
    """

    return _peaks(pushes)[:count], _peaks(pushes.like(-pushes.values))[:count]


def _peaks(column: Ragged) -> list[tuple[int, int]]:
    """(row, position) of the largest number of each row that has one above 0; largest first."""
    tops = [(float(row.max()), i, int(row.argmax())) for i, row in enumerate(column.rows()) if (row > 0).any()]
    return [(i, position) for _, i, position in sorted(tops, key=lambda top: -top[0])]


def windows(pushes: Sequence[Ragged], count: int) -> list[tuple[int, int]]:
    """(row, position) of at most `count` tokens, each in another row, that show the pushes of all algorithms.

    The algorithms take turns; each names the rows of its strongest pushes, strongest first.
    """
    chosen: dict[int, int] = {}
    for turn in itertools.zip_longest(*(_peaks(p.like(p.values.abs())) for p in pushes)):
        for row, position in filter(None, turn):
            if len(chosen) < count:
                chosen.setdefault(row, position)
    return list(chosen.items())
