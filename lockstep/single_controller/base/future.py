"""What a call with `blocking=False` returns."""

from abc import ABC, abstractmethod
from typing import Any


class Future(ABC):
    """A value that workers may still be computing."""

    @abstractmethod
    def get(self, timeout_s: float | None = None) -> Any:
        """Wait and return the collected value; a second call returns it again.

        The deadline is `timeout_s` from now, or the group's own, counted from the call, when it is None. Passing it is
        a failure of the group, so poll with `done()` instead of short timeouts. Raises WorkerError, WorkerDied or
        WorkerTimeout.
        """

    @abstractmethod
    def done(self) -> bool:
        """Whether `get` would return or raise at once."""


class CompletedFuture(Future):
    """A value that is there already."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def get(self, timeout_s: float | None = None) -> Any:
        """The value."""
        return self._value

    def done(self) -> bool:
        """Always true."""
        return True
