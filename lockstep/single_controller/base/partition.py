"""Sharing out rows of unequal size."""

import heapq
from collections.abc import Sequence

from lockstep.protocol import DataProto

_GROUPS_A_RANK = 4
"""Fewer groups than this on a rank could not be balanced."""


def balanced_partition(sizes: Sequence[int], parts: int) -> list[list[int]]:
    """Share the indices of `sizes` among `parts` so that the sums are close: largest first, each to the part with the
    least so far.

    Every index appears once, in rising order inside its part. A part may be empty. The largest sum exceeds the average
    by at most the largest size. Raises ValueError when `parts` is not positive or a size is negative.
    """
    if parts < 1:
        raise ValueError(f"parts must be at least 1, got {parts}")
    if any(size < 0 for size in sizes):
        raise ValueError(f"sizes must not be negative, got {min(sizes)}")
    # The count breaks ties, so that rows of size zero spread out as well.
    loads = [(0, 0, part) for part in range(parts)]
    shares: list[list[int]] = [[] for _ in range(parts)]
    for index in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        load, count, part = heapq.heappop(loads)
        shares[part].append(index)
        heapq.heappush(loads, (load + int(sizes[index]), count + 1, part))
    return [sorted(share) for share in shares]


def row_cost(tokens: int) -> int:
    """What a row of this many tokens costs beside others: its tokens, and the pairs of them that attention looks at.

    Attention takes as long as everything else at about 32 thousand tokens in a model of 1.5 billion parameters, and at twice as many in
    one of 7 billion (2 * body / (layers * widths) of models/flops.py); rows far below that are balanced by tokens.
    """
    return tokens + tokens * tokens // 32768


def share_rows(batch: DataProto, parts: int) -> list[list[int]]:
    """Row numbers of each part, balanced by cost. Neighbouring rows of one prompt stay together where there are enough prompts.

    Together they compute their prompt once.
    """
    counts = batch.token_counts().tolist()
    repeats = batch.repeats_prompt() if "prompts" in batch.columns else [False] * len(counts)
    groups: list[list[int]] = []
    for row, again in enumerate(repeats):
        groups[-1].append(row) if again else groups.append([row])
    if len(groups) < _GROUPS_A_RANK * parts:
        groups = [[row] for row in range(len(counts))]
    shares = balanced_partition([sum(row_cost(counts[row]) for row in group) for group in groups], parts)
    return [[row for group in share for row in groups[group]] for share in shares]
