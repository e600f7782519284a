"""Write trl.json: what TRL's own trainers make of given log-probs. Run it where TRL is installed; the tests read the file.

`python trl_numbers.py` calls TRL's loss code with a model that only hands out log-probs from a table, one pair at a time (TRL takes
the mean over its batch), in float64. TRL's sft loss is a token mean, so with one pair it is the nll of the chosen response.
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import torch
import trl
from trl import DPOTrainer, KTOTrainer
from trl.experimental.cpo import CPOTrainer
from trl.experimental.orpo import ORPOTrainer

WIDTH = 6
PAIRS = [((3, 5), 1.0), ((4, 2), 0.3), ((1, 6), 3.0), ((6, 6), 0.05), ((2, 3), 8.0)]
"""Lengths of chosen and rejected, and the scale of the log-probs."""


class Table:
    """A model whose log-probs are given."""

    def __init__(self, log_probs: torch.Tensor) -> None:
        self.log_probs, self.training = log_probs, True

    def __call__(self, *, labels: torch.Tensor, **inputs: object) -> SimpleNamespace:
        other = torch.zeros_like(self.log_probs)
        rows = self.log_probs if len(labels) == len(self.log_probs) else self.log_probs[: len(labels)]
        return SimpleNamespace(log_probs=rows, entropy=other, mean_logits=other, is_top1=other.bool())


def trainer(**values: object) -> SimpleNamespace:
    """What TRL's methods read of their trainer."""
    plain = SimpleNamespace(device=torch.device("cpu"), gather=lambda x: x, gather_for_metrics=lambda x: x)
    shared = {
        "accelerator": plain,
        "aux_loss_enabled": False,
        "_metrics": defaultdict(lambda: defaultdict(list)),
        "_total_train_tokens": 0,
        "_tp_size": 1,
        "precompute_ref_logps": True,
        "use_weighting": False,
        "loss_weights": [1.0],
    }
    return SimpleNamespace(**shared, **values)


def mask_of(lengths: list[int]) -> torch.Tensor:
    """[rows, 1 + WIDTH] completion masks behind a prompt of one token."""
    return torch.tensor([[0] + [1] * n + [0] * (WIDTH - n) for n in lengths])


def dpo(kind: str, log_probs: torch.Tensor, ref: torch.Tensor, lengths: list[int], beta: float, smoothing: float) -> float:
    model, mask = Table(log_probs), mask_of(lengths)
    self = trainer(
        model=model,
        ld_alpha=None,
        f_divergence_type="reverse_kl",
        loss_types=[kind],
        beta=beta,
        label_smoothing=smoothing,
    )
    inputs = {"input_ids": torch.ones_like(mask), "attention_mask": torch.ones_like(mask), "completion_mask": mask}
    inputs |= {"ref_chosen_logps": ref[:1], "ref_rejected_logps": ref[1:]}
    return DPOTrainer._compute_loss(self, model, inputs, False).item()


def kto(log_probs: torch.Tensor, ref: torch.Tensor, kl: torch.Tensor, ref_kl: torch.Tensor, lengths: list[int]) -> dict[str, float]:
    model, mask = Table(log_probs), mask_of(lengths)
    self = trainer(model=model, loss_type="kto", beta=0.1, calculate_KL=True, desirable_weight=1.0, undesirable_weight=1.5)
    self._compute_kl_logps = lambda model, batch: kl
    inputs = {"input_ids": torch.ones_like(mask), "attention_mask": torch.ones_like(mask), "completion_mask": mask}
    inputs |= {"label": torch.arange(len(ref)) % 2 == 0, "ref_logps": ref, "ref_KL_logps": ref_kl}
    loss = KTOTrainer._compute_loss(self, model, inputs, False)
    return {"loss": loss.item(), "kl": self._metrics["train"]["kl"][0]}


def main() -> None:
    torch.manual_seed(0)
    found: dict[str, list[float]] = defaultdict(list)
    sums, refs, lengths = [], [], []
    for pair, scale in PAIRS:
        log_probs = -scale * torch.rand(2, WIDTH, dtype=torch.float64) * mask_of(list(pair))[:, 1:]
        own, ref = log_probs.sum(1), log_probs.sum(1) + 4 * torch.randn(2, dtype=torch.float64)
        mean = own / torch.tensor(pair)
        for name, kind in {"sigmoid": "sigmoid", "hinge": "hinge", "ipo": "ipo", "nll": "sft"}.items():
            found[name].append(dpo(kind, log_probs, ref, list(pair), 0.1, 0.0))
        found["sigmoid_norm"].append(dpo("sigmoid_norm", log_probs, ref, list(pair), 5.0, 0.0))
        found["robust"].append(dpo("robust", log_probs, ref, list(pair), 0.1, 0.1))
        # Sorting one pair changes nothing, so that aot is DPO with label smoothing.
        found["smoothed"].append(dpo("aot", log_probs, ref, list(pair), 0.1, 0.1))
        free = {"alpha": 0.0, "label_smoothing": 0.0}
        for name, kind, beta, given in (("cpo", "sigmoid", 0.1, own), ("simpo", "simpo", 2.0, mean)):
            self = trainer(loss_type=kind, beta=beta, simpo_gamma=1.0, **free)
            found[name].append(CPOTrainer.cpo_loss(self, given[:1], given[1:])[0].item())
        # TRL casts to float32 here.
        found["orpo"].append(-ORPOTrainer.odds_ratio_loss(trainer(beta=0.1), mean[:1], mean[1:])[0].item())
        sums.append(own.tolist()), refs.append(ref.tolist()), lengths.append(list(pair))
    rows = torch.tensor(sums).double().flatten()
    kl, ref_kl = rows.roll(1) + 2.0, rows.roll(1) + 1.0 + torch.randn(len(rows), dtype=torch.float64)
    table = torch.zeros(len(rows), WIDTH, dtype=torch.float64)
    table[:, 0] = torch.tensor(sums, dtype=torch.float64).flatten()
    unpaired = kto(table, torch.tensor(refs, dtype=torch.float64).flatten(), kl, ref_kl, [n for pair in lengths for n in pair])
    assert unpaired["kl"] > 0
    given = {"log_prob": sums, "ref_log_prob": refs, "length": lengths}
    mismatched = {"mismatched_log_prob": kl.tolist(), "mismatched_ref_log_prob": ref_kl.tolist()}
    text = json.dumps({"trl": trl.__version__, **given, **mismatched, "losses": found, "kto": unpaired}, indent=1)
    (Path(__file__).parent / "trl.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
