"""A student's columns with a teacher, on one rank and on two, against two plain modules. The other engines have theirs in their folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers.distill import KIND, assert_a_student_learns_as_in_plain_pytorch
from helpers.engine_properties import TIED, Layout

from lockstep.errors import ConfigError
from lockstep.workers.distill import set_teacher


@pytest.mark.parametrize(
    ("layout", "changes"),
    [
        (Layout("fsdp2", 1), TIED),
        (Layout("fsdp2", 2), {"padding": 2}),
        (Layout("fsdp", 2), {"padding": 2}),
        (Layout("fsdp2", 2, {"tensor_parallel_size": 2}), TIED),
    ],
    ids=["one rank", "fsdp2", "fsdp", "layers divided"],
)
def test_an_update_is_that_of_two_plain_modules_however_they_are_sharded(
    tmp_path: Path, layout: Layout, changes: dict[str, Any]
) -> None:
    assert_a_student_learns_as_in_plain_pytorch(layout, tmp_path, **changes)


def test_a_model_that_makes_its_own_logits_is_refused() -> None:
    class Without:
        hands_out_hidden = False

    engine: Any = Without()
    with pytest.raises(ConfigError, match=r"model\.path are not its output layer's"):
        set_teacher(engine, engine, KIND)
