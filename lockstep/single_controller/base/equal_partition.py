"""Parts of equal numbers of rows and close sums, for loops of one's own; the trainer's parts may differ in number."""

from collections.abc import Sequence


def equal_partition(sizes: Sequence[int], parts: int) -> list[list[int]]:
    """Share the indices of `sizes` among `parts`, as many in each, so that the sums are close.

    They are dealt out by size, the largest first, in rounds of one for each part: the part with the least so far takes the largest of the
    round. Raises ValueError when the number of sizes is no multiple of `parts`.
    """
    if parts < 1 or len(sizes) % parts:
        raise ValueError(f"{len(sizes)} sizes cannot be shared among {parts} parts with as many in each")
    shares: list[list[int]] = [[] for _ in range(parts)]
    order = sorted(range(len(sizes)), key=lambda i: -sizes[i])
    for start in range(0, len(order), parts):
        lightest = sorted(shares, key=lambda share: sum(sizes[i] for i in share))
        for index, share in zip(order[start : start + parts], lightest, strict=True):
            share.append(index)
    return [sorted(share) for share in shares]
