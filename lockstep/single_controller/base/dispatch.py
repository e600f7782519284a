"""The meaning of each dispatch mode: a pure plan from one call to a call per rank, and back from the results to one value.

A plan is made before anything is sent. It returns the calls (rank i gets call i; the last ranks get none where there are fewer calls) and
the function that collects the results of those ranks. The two are made together because putting rows back in order needs to know how they
were cut. Rows of unequal size are shared out by cost (`share_rows`).
"""

import asyncio
import heapq
import inspect
from collections.abc import Callable, Sequence
from itertools import pairwise
from operator import itemgetter
from typing import Any

import torch

from lockstep.protocol import DataProto
from lockstep.single_controller.base.decorator import Dispatch

_GROUPS_PER_RANK = 4
"""Fewer groups than this on a rank could not be balanced."""

Args = tuple[Any, ...]
Kwargs = dict[str, Any]
Call = tuple[Args, Kwargs]
"""The arguments of one rank's call."""
Collect = Callable[[list[Any]], Any]
RankCalls = tuple[list[Call], Collect]
Mode = Callable[[Args, Kwargs, int], RankCalls]
"""(args, kwargs, world size) -> the plan. Raises ValueError for arguments that do not suit it."""


def find_mode(mode: Dispatch | str) -> Mode:
    """What makes the plans of a mode. Raises ValueError for an unknown one."""
    try:
        return _MODES[mode]
    except KeyError:
        names = [m if isinstance(m, str) else f"Dispatch.{m.name}" for m in _MODES]
        raise ValueError(f"unknown dispatch mode {mode!r}; there are {names}; add one with register_dispatch_mode") from None


def register_dispatch_mode(name: str, split: Callable[[Args, Kwargs, int], list[Call]], collect: Collect) -> None:
    """Add a mode for `@register(dispatch_mode=name)`.

    `split(args, kwargs, world_size)` returns an `(args, kwargs)` per rank; `collect(results)` makes the value from the
    list of results. Raises ValueError when the name is taken.
    """
    if name in _MODES or any(name == mode.value for mode in Dispatch):
        raise ValueError(f"dispatch mode {name!r} is already registered")

    def plan(args: Args, kwargs: Kwargs, world_size: int) -> RankCalls:
        calls = split(args, kwargs, world_size)
        if not 1 <= len(calls) <= world_size:
            raise ValueError(f"dispatch mode {name!r} made {len(calls)} calls for {world_size} ranks; rank i gets call i")
        return calls, collect

    _MODES[name] = plan


def _one_entry_per_rank(args: Args, kwargs: Kwargs, world_size: int) -> RankCalls:
    for name, value in _named(args, kwargs).items():
        if not isinstance(value, list | tuple):
            raise ValueError(f"{name} must be a list with one entry for each of {world_size} ranks, got {type(value).__name__}")
        if len(value) != world_size:
            raise ValueError(f"{name} has {len(value)} entries, but there are {world_size} ranks")
    return [_map(itemgetter(rank), args, kwargs) for rank in range(world_size)], list


def _rows_in_order(args: Args, kwargs: Kwargs, world_size: int) -> RankCalls:
    shares = _share_rows(args, kwargs, world_size)
    return _cut(args, kwargs, shares), lambda results: _restore(results, shares)


def _rows_with_function(args: Args, kwargs: Kwargs, world_size: int) -> RankCalls:
    if not args or not callable(args[0]):
        got = type(args[0]).__name__ if args else "no positional argument"
        raise ValueError(f"DP_COMPUTE_PROTO_WITH_FUNC takes a function first, got {got}")
    return _rows_in_order(args, kwargs, world_size)


_MODES: dict[Dispatch | str, Mode] = {
    Dispatch.RANK_ZERO: lambda args, kwargs, world_size: ([(args, kwargs)], lambda results: results[0]),
    Dispatch.ONE_TO_ALL: lambda args, kwargs, world_size: ([(args, kwargs)] * world_size, list),
    Dispatch.ALL_TO_ALL: _one_entry_per_rank,
    Dispatch.DP_COMPUTE: _one_entry_per_rank,
    Dispatch.DP_COMPUTE_PROTO: _rows_in_order,
    Dispatch.DP_COMPUTE_PROTO_WITH_FUNC: _rows_with_function,
    Dispatch.DP_COMPUTE_METRIC: lambda args, kwargs, world_size: (_cut(args, kwargs, _share_rows(args, kwargs, world_size)), list),
}


def _share_rows(args: Args, kwargs: Kwargs, world_size: int) -> list[list[int]]:
    """Which rows each rank gets: balanced by cost where rows have tokens, else runs of neighbouring rows."""
    batches = {name: value for name, value in _named(args, kwargs).items() if isinstance(value, DataProto)}
    if not batches:
        raise ValueError(f"this method shares out rows, but none of its {len(args) + len(kwargs)} arguments is a DataProto")
    sizes = {name: len(batch) for name, batch in batches.items()}
    rows, *others = set(sizes.values())
    if others:
        raise ValueError(f"all DataProto arguments must have the same number of rows, got {sizes}")
    for batch in batches.values() if world_size > 1 else ():
        if batch.token_counts().any() or "unit" in batch.columns:
            return share_rows(batch, world_size)
    return [list(range(a, b)) for a, b in pairwise(rows * rank // world_size for rank in range(world_size + 1))]


def _cut(args: Args, kwargs: Kwargs, shares: list[list[int]]) -> list[Call]:
    if len(shares) == 1:
        return [(args, kwargs)]  # a lone rank gets the caller's own object, not a copy

    def part(share: list[int]) -> Call:
        rows = torch.tensor(share, dtype=torch.int64)
        return _map(lambda value: value.select_idxs(rows) if isinstance(value, DataProto) else value, args, kwargs)

    return [part(share) for share in shares]


def _restore(results: list[Any], shares: list[list[int]]) -> Any:
    """Resulting rows in the order of the input; a list when the results are not rows.

    For each row that went out, every rank returns the same whole number of rows, at least 1.
    """
    are_rows = [isinstance(result, DataProto) for result in results]
    if not any(are_rows):
        return list(results)
    if not all(are_rows):
        kinds = {rank: type(result).__name__ for rank, result in enumerate(results)}
        raise ValueError(f"either every rank returns a DataProto or none does, got {kinds}")
    sent = [len(share) for share in shares]
    got = [len(result) for result in results]
    copies = max((g // s for g, s in zip(got, sent, strict=True) if s), default=1)
    if copies < 1 or got != [copies * s for s in sent]:
        raise ValueError(
            f"ranks were given {sent} rows and returned {got}; every rank must return the same whole number of rows "
            "for each row it got (what is not rows is returned as a dict)"
        )
    # A rank without rows may not know the columns or their types, so it has no say in them.
    parts = [result for result in results if len(result)]
    if len(results) == 1 or not parts:
        return results[0]
    order = [row * copies + copy for share in shares for row in share for copy in range(copies)]
    return DataProto.concat(parts).select_idxs(torch.tensor(order).argsort())


def _map(function: Callable[[Any], Any], args: Args, kwargs: Kwargs) -> Call:
    return tuple(map(function, args)), {name: function(value) for name, value in kwargs.items()}


def _named(args: Args, kwargs: Kwargs) -> dict[str, Any]:
    return {f"argument {name!r}": value for name, value in (*enumerate(args), *kwargs.items())}


# -- rows of unequal size ----------------------------------------------------------------------------------------------------


def awaited(result: Any) -> Any:
    """What a worker's method returned; of an `async def` one, what it returns when it has run."""
    return asyncio.run(result) if inspect.iscoroutine(result) else result


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
    """Row numbers of each part, balanced by cost. Neighbouring rows of one prompt stay together where there are enough prompts, those of
    one unit (`DataProto.units`) always.

    Together they compute their prompt once.
    """
    counts = batch.token_counts().tolist()
    repeats = batch.repeats_prompt() if "prompts" in batch.columns else [False] * len(counts)
    units = batch.units()
    groups = list[list[int]]()
    for unit in units:
        if repeats[unit[0]]:
            groups[-1] += unit
        else:
            groups.append(list(unit))
    if len(groups) < _GROUPS_PER_RANK * parts:
        groups = units
    shares = balanced_partition([sum(row_cost(counts[row]) for row in group) for group in groups], parts)
    return [[row for group in share for row in groups[group]] for share in shares]
