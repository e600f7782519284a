"""`@register` says how a group calls a worker's method. It only marks the method; `dispatch.py` gives the modes their
meaning."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar

_MARK = "_lockstep_registration"

Method = TypeVar("Method", bound=Callable[..., Any])


class Dispatch(Enum):
    """How the arguments of one call become a call per rank, and the results one value."""

    RANK_ZERO = "rank_zero"
    """Rank 0 alone is called; the value is its result."""
    ONE_TO_ALL = "one_to_all"
    """Every rank gets the same arguments; the value is the list of results."""
    ALL_TO_ALL = "all_to_all"
    """Every argument is a list with one entry per rank; the value is the list of results."""
    DP_COMPUTE = "dp_compute"
    """The same as ALL_TO_ALL: the caller has cut the data itself."""
    DP_COMPUTE_PROTO = "dp_compute_proto"
    """The rows of every DataProto are shared out, the rest goes to all; resulting rows come back in the order of the
    input."""
    DP_COMPUTE_PROTO_WITH_FUNC = "dp_compute_proto_with_func"
    """DP_COMPUTE_PROTO whose first argument is a function, given to all."""
    DP_COMPUTE_METRIC = "dp_compute_metric"
    """Rows are shared out as in DP_COMPUTE_PROTO; the value is the list of results, whatever they are."""


class Execute(Enum):
    """Which ranks are called."""

    ALL = "all"
    RANK_ZERO = "rank_zero"
    """Rank 0 alone, as with Dispatch.RANK_ZERO. For modes that give every rank the same arguments."""


@dataclass(frozen=True)
class Registration:
    """What `@register` wrote on a method."""

    dispatch_mode: Dispatch | str
    blocking: bool


def register(
    dispatch_mode: Dispatch | str = Dispatch.ALL_TO_ALL, execute_mode: Execute = Execute.ALL, blocking: bool = True
) -> Callable[[Method], Method]:
    """Let groups call this method of a worker.

    `dispatch_mode` is a Dispatch or the name given to `register_dispatch_mode`. With `blocking=False` the group's
    method returns a `Future` at once. Raises ValueError when Execute.RANK_ZERO would drop the arguments meant for other
    ranks.
    """
    if execute_mode is Execute.RANK_ZERO and dispatch_mode not in (Dispatch.RANK_ZERO, Dispatch.ONE_TO_ALL):
        raise ValueError(
            f"Execute.RANK_ZERO with {dispatch_mode} would drop the other ranks' share of the arguments; "
            "use dispatch_mode=Dispatch.ONE_TO_ALL or Dispatch.RANK_ZERO"
        )
    registration = Registration(Dispatch.RANK_ZERO if execute_mode is Execute.RANK_ZERO else dispatch_mode, blocking)

    def mark(method: Method) -> Method:
        setattr(method, _MARK, registration)
        return method

    return mark


def registered_methods(cls: type) -> dict[str, Registration]:
    """The registered methods of a class by name. An override in a subclass keeps the registration it overrides unless
    it has its own."""
    found: dict[str, Registration] = {}
    for klass in cls.__mro__:
        for name, attribute in vars(klass).items():
            registration = getattr(attribute, _MARK, None)
            if registration is not None:
                found.setdefault(name, registration)
    return dict(sorted(found.items()))
