"""Sandboxes that the tests share; without bubblewrap there is nothing to test."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest

from lockstep.judging.sandbox import LocalSandbox, ProgramLimits


@pytest.fixture(scope="session")
def sandbox() -> Iterator[LocalSandbox]:
    """Small limits, so that breaking them is quick."""
    if shutil.which("bwrap") is None:
        pytest.skip("bubblewrap is not installed")
    limits = ProgramLimits(wall_s=3.0, memory_mb=256, scratch_mb=16, num_files=2000, num_processes=32, output_bytes=100_000)
    with LocalSandbox(limits=limits) as made:
        yield made
