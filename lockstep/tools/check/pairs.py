"""What holds for every preference loss. A case is a mini-batch of P pairs: its rows are pairs, its two tokens chosen and rejected."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lockstep.algorithms.preference_losses import bind_preference_loss, bind_preference_prepare, takes_pairs
from lockstep.tools.check.properties import (
    TOLERANCE,
    Case,
    Property,
    Results,
    Violation,
    adds_up_over_parts,
    ignores_the_order_of_rows,
    is_finite,
    select,
)


@dataclass(frozen=True)
class PreferenceSubject:
    """A preference loss: its mean over the mini-batch, its gradient by log_prob [P, 2], and the rewards [P, 2]."""

    loss: Callable[..., tuple[Tensor, Tensor]]
    parameters: Mapping[str, Any]

    def evaluate(self, case: Case) -> Results:
        """What it makes of the whole mini-batch. Raises Violation when that has other shapes."""
        return self.of_parts(case, [list(range(len(case.mask)))])[0]

    def of_parts(self, case: Case, parts: list[list[int]]) -> list[Results]:
        """The results of each of these parts (numbers of pairs) of a mini-batch."""
        columns = case.tokens | {"is_chosen": torch.tensor([True, False]).expand(case.mask.shape)}
        prepare = bind_preference_prepare(self.loss, self.parameters)
        if prepare is not None:
            made = prepare({name: x.flatten() for name, x in columns.items()}, None)
            columns |= {name: x.reshape(case.mask.shape) for name, x in made.items()}
        units = len(case.mask) if takes_pairs(self.loss) else case.mask.numel()
        return [self._part(select(replace(case, tokens=columns), part).tokens, units) for part in parts]

    def _part(self, columns: Mapping[str, Tensor], units: int) -> Results:
        log_prob = columns["log_prob"].clone().requires_grad_()
        given = {**columns, "log_prob": log_prob}
        if not takes_pairs(self.loss):
            given = {name: x.flatten() for name, x in given.items()}
        loss, rewards = bind_preference_loss(self.loss, self.parameters)(given, None)
        wanted = given["log_prob"].shape
        if loss.shape != wanted[:1] or rewards.shape != wanted:
            raise Violation(
                f"the loss must be {tuple(wanted[:1])} and the rewards {tuple(wanted)}, but they are {tuple(loss.shape)} and "
                f"{tuple(rewards.shape)}: return the loss before any mean, which is taken over the whole mini-batch"
            )
        total = loss.sum() / units
        gradient = torch.autograd.grad(total, log_prob)[0] if total.requires_grad else torch.zeros_like(log_prob)
        return {"the loss": total.detach(), "the gradient": gradient, "the rewards": rewards.detach().reshape(log_prob.shape)}


def is_per_pair(subject: PreferenceSubject, case: Case) -> None:
    """The loss has one number per pair (or per response), the rewards one per response; means are taken later, over the mini-batch."""
    subject.evaluate(case)


def prefers_the_chosen(subject: PreferenceSubject, case: Case) -> None:
    """No step away from the chosen or towards the rejected response. Not a law: a loss may hold a margin, as ipo does."""
    away = subject.evaluate(case)["the gradient"] * torch.tensor([1.0, -1.0], dtype=torch.float64)
    if (away > TOLERANCE).any():
        raise Violation("the gradient lowers the chosen response's log-prob, or raises the rejected one's")


PAIR_PROPERTIES: dict[str, Property] = {
    "one number per pair": is_per_pair,
    "finite": is_finite,
    "order of pairs": ignores_the_order_of_rows,
    "micro-batches and ranks": adds_up_over_parts,
}
PAIR_WARNINGS: dict[str, Property] = {"prefers the chosen": prefers_the_chosen}
