import pytest

from lockstep.generation.cpu.kernels import Library, library


@pytest.fixture
def compiled() -> Library:
    """The compiled functions; skips where there is no compiler."""
    found = library()
    if found is None:
        pytest.skip("needs a C compiler")
    return found
