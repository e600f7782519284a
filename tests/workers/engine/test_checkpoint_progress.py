"""How far the optimizer is, read from a checkpoint that somebody may have changed."""

import pytest
import torch

from lockstep.errors import DataError
from lockstep.workers.engine.checkpoint import PROGRESS, Progress, read_progress, write_progress

SPECS = {"a": (torch.float32, (1,))}


def test_progress_is_read_back(tmp_path):
    write_progress(tmp_path, Progress(3, {"a": 2}))
    assert read_progress(tmp_path, SPECS) == Progress(3, {"a": 2})


@pytest.mark.parametrize(
    "text",
    [
        '{"updates": -1, "steps": {"a": 1}}',
        '{"updates": 1, "steps": {"a": -2}}',
        '{"updates": 1e400, "steps": {"a": 1}}',
        "[" * 100_000,
        "[]",
        "{}",
    ],
)
def test_malformed_progress_is_an_error_that_names_the_file(tmp_path, text):
    (tmp_path / PROGRESS).write_text(text)
    with pytest.raises(DataError, match=PROGRESS):
        read_progress(tmp_path, SPECS)
