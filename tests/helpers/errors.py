"""Errors by their type and key."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from lockstep.errors import ConfigError, DataError


@contextmanager
def raises(kind: type[ConfigError | DataError], key: str) -> Iterator[pytest.ExceptionInfo[ConfigError | DataError]]:
    """As pytest.raises, for an error about this key, which the message names."""
    with pytest.raises(kind) as caught:
        yield caught
    assert caught.value.key == key
    assert key in str(caught.value)
