import pytest

from lockstep.workers.rollout.native.cpu.compiled import library
from lockstep.workers.rollout.native.cpu.kernels import Library


@pytest.fixture
def compiled() -> Library:
    """The compiled functions; skips where there is no compiler."""
    found = library()
    if found is None:
        pytest.skip("needs a C compiler")
    return found
