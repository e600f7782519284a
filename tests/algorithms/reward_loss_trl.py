"""Write reward_loss_trl.json: what TRL's RewardTrainer makes of given scores, in float64. Run it where TRL is installed; the tests read
the file."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import torch
import trl
from trl import RewardTrainer


def loss(scores: torch.Tensor, margin: torch.Tensor | None, coefficient: float | None) -> float:
    """TRL's loss of the scores [P, 2] of pairs; its batches are all chosen, then all rejected."""
    plain = SimpleNamespace(gather=lambda x: x, gather_for_metrics=lambda x: x)
    arguments = SimpleNamespace(center_rewards_coefficient=coefficient)
    model = SimpleNamespace(training=False)
    self = SimpleNamespace(model=model, args=arguments, accelerator=plain, _metrics=defaultdict(lambda: defaultdict(list)))
    self._total_train_tokens = 0
    inputs = {} if margin is None else {"margin": margin}
    answer = SimpleNamespace(logits=scores.t().reshape(-1, 1))
    return RewardTrainer.compute_loss(self, lambda **_: answer, inputs).item()


def main() -> None:
    torch.manual_seed(0)
    scores = torch.randn(7, 2, dtype=torch.float64) * torch.tensor([0.1, 1, 1, 2, 5, 20, 60], dtype=torch.float64)[:, None]
    margin = torch.rand(7, dtype=torch.float64) * 3
    cases = [
        {"margin": None if m is None else m.tolist(), "coefficient": c, "loss": loss(scores, m, c)}
        for m in (None, margin)
        for c in (None, 0.01, 0.5)
    ]
    text = json.dumps({"trl": trl.__version__, "scores": scores.tolist(), "cases": cases}, indent=1)
    (Path(__file__).parent / "reward_loss_trl.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
