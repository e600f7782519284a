import json
import math
from pathlib import Path

import pytest
import torch

from lockstep.algorithms.reward_loss import bradley_terry

TRL = json.loads((Path(__file__).parent / "reward_loss_trl.json").read_text())


def test_it_is_trls_loss_for_every_margin_and_coefficient() -> None:
    chosen, rejected = torch.tensor(TRL["scores"], dtype=torch.float64).unbind(-1)
    for case in TRL["cases"]:
        margin = torch.tensor(case["margin"] or [0.0] * len(chosen), dtype=torch.float64)
        loss = bradley_terry(chosen, rejected, margin, case["coefficient"] or 0.0).mean()
        assert loss.item() == pytest.approx(case["loss"], rel=1e-12)


def test_equal_scores_cost_ln_2_and_the_gradient_pulls_them_apart_and_towards_0() -> None:
    chosen, rejected = (torch.tensor([x], dtype=torch.float64, requires_grad=True) for x in (2.0, 2.0))
    loss = bradley_terry(chosen, rejected, torch.zeros(1), 0.01).sum()
    assert loss.item() == pytest.approx(math.log(2) + 0.01 * 16)
    loss.backward()
    assert chosen.grad.item() == pytest.approx(-0.5 + 0.02 * 4)
    assert rejected.grad.item() == pytest.approx(0.5 + 0.02 * 4)


def test_scores_far_apart_are_finite() -> None:
    far = torch.tensor([1e4, -1e4])
    assert bradley_terry(far, -far, torch.zeros(2), 0.0).tolist() == [0.0, 2e4]
