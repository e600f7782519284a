import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.config.engine import OptimConfig
from lockstep.workers.engine.optim import learning_rate


@given(
    total=st.integers(1, 40),
    steps=st.integers(-1, 10),
    ratio=st.floats(0, 1),
    kind=st.sampled_from(["constant", "cosine"]),
    floor=st.floats(0, 1),
)
def test_the_schedule_equals_a_loop(total: int, steps: int, ratio: float, kind: str, floor: float) -> None:
    config = OptimConfig(lr=2e-4, lr_warmup_steps=steps, lr_warmup_steps_ratio=ratio, lr_scheduler_type=kind, min_lr_ratio=floor)
    warmup = steps if steps >= 0 else math.floor(ratio * total)
    expected = [2e-4 * (i + 1) / warmup for i in range(warmup)]
    after = total - warmup
    for i in range(after):
        share = i / (after - 1) if after > 1 else 0.0
        expected.append(2e-4 if kind == "constant" else 2e-4 * (floor + (1 - floor) * (1 + math.cos(math.pi * share)) / 2))
    assert [learning_rate(i, total, config) for i in range(total)] == pytest.approx(expected[:total], rel=1e-9, abs=1e-18)


def test_a_cosine_ends_at_its_floor_and_stays_there() -> None:
    config = OptimConfig(lr=1.0, lr_scheduler_type="cosine", min_lr_ratio=0.25, lr_warmup_steps=2)
    assert learning_rate(9, 10, config) == pytest.approx(0.25)
    assert learning_rate(50, 10, config) == pytest.approx(0.25)
