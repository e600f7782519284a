"""A lazy sequence: the next micro-batch is cut and packed while the device works on the one before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class LazySequence(Sequence[T], Generic[T]):
    """`make(i)` for i in 0...length - 1, each called at most once."""

    def __init__(self, length: int, make: Callable[[int], T]) -> None:
        self._length, self._make, self._made = length, make, dict[int, T]()

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(self._length)[index]]
        index = range(self._length)[index]
        if index not in self._made:
            self._made[index] = self._make(index)
        return self._made[index]
