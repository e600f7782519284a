"""What holds for every preference loss: how pairs are batched never changes the numbers. Cases and subjects as in `properties`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lockstep.algorithms.preference_losses import bind_preference_loss, bind_preference_prepare, takes_pairs
from lockstep.tools.check.properties import TOLERANCE, Property, Results, Violation, same


@dataclass(frozen=True, kw_only=True)
class PairCase:
    """A mini-batch of P pairs; the gradient is taken of `log_prob`."""

    columns: dict[str, Tensor]
    """float64 [P, 2] each, chosen and rejected."""
    order: list[int]
    """Another order of the pairs."""
    cut: int
    """Pairs before this one are the first micro-batch (or rank), the others the second."""

    def describe(self, names: Collection[str]) -> str:
        """The batch, one line for each column in `names`."""
        return "\n".join(f"{name:24} {x.tolist()}" for name, x in self.columns.items() if name in names)


@dataclass(frozen=True)
class PreferenceSubject:
    """A preference loss: its mean over the mini-batch, its gradient by log_prob [P, 2], and the rewards [P, 2]."""

    loss: Callable[..., tuple[Tensor, Tensor]]
    parameters: Mapping[str, Any]

    def of_parts(self, case: PairCase, parts: list[list[int]]) -> list[Results]:
        """The results of each of these parts (numbers of pairs) of a mini-batch."""
        columns = {**case.columns, "is_chosen": torch.tensor([True, False]).expand(len(case.order), 2)}
        prepare = bind_preference_prepare(self.loss, self.parameters)
        if prepare is not None:
            made = prepare({name: x.flatten() for name, x in columns.items()}, None)
            columns |= {name: x.unflatten(0, (-1, 2)) for name, x in made.items()}
        units = len(case.order) * (1 if takes_pairs(self.loss) else 2)
        return [self._part({name: x[part] for name, x in columns.items()}, units) for part in parts]

    def _part(self, columns: dict[str, Tensor], units: int) -> Results:
        log_prob = columns["log_prob"].clone().requires_grad_()
        by_pair = takes_pairs(self.loss)
        given = columns | {"log_prob": log_prob}
        given = given if by_pair else {name: x.flatten() for name, x in given.items()}
        loss, rewards = bind_preference_loss(self.loss, self.parameters)(given, None)
        found, wanted = tuple(loss.shape), ((len(log_prob),) if by_pair else (log_prob.numel(),))
        if found != wanted or rewards.shape != given["log_prob"].shape:
            raise Violation(
                f"the loss must be {wanted} and the rewards {tuple(given['log_prob'].shape)}, but they are {found} and "
                f"{tuple(rewards.shape)}: return the loss before any mean, which is taken over the whole mini-batch"
            )
        total = loss.sum() / units
        gradient = torch.autograd.grad(total, log_prob)[0] if total.requires_grad else torch.zeros_like(log_prob)
        return {"the loss": total.detach(), "the gradient": gradient, "the rewards": rewards.detach().reshape(log_prob.shape)}

    def evaluate(self, case: PairCase) -> Results:
        """What it makes of the whole mini-batch."""
        return self.of_parts(case, [list(range(len(case.order)))])[0]


def is_per_pair(subject: PreferenceSubject, case: PairCase) -> None:
    """The loss has one number a pair (or a response), the rewards one a response; the mean is taken later, over the whole mini-batch."""
    subject.evaluate(case)


def is_finite(subject: PreferenceSubject, case: PairCase) -> None:
    """Log-probs far from 0, and 0 itself, give a finite loss, gradient and rewards."""
    for name, x in subject.evaluate(case).items():
        if not x.isfinite().all():
            raise Violation(f"not finite: {name}")


def ignores_the_order_of_pairs(subject: PreferenceSubject, case: PairCase) -> None:
    """Pairs in another order keep their own results, and the loss its value."""
    moved = PairCase(columns={name: x[case.order] for name, x in case.columns.items()}, order=case.order, cut=case.cut)
    expected = {name: x[case.order] if x.dim() else x for name, x in subject.evaluate(case).items()}
    same(f"with the pairs in the order {case.order}", subject.evaluate(moved), expected)


def adds_up_over_parts(subject: PreferenceSubject, case: PairCase) -> None:
    """Micro-batches and ranks: the losses and gradients of the parts of a mini-batch add up to those of the whole."""
    pairs = list(range(len(case.order)))
    whole, first, second = subject.of_parts(case, [pairs, pairs[: case.cut], pairs[case.cut :]])
    added = {name: torch.cat([x, second[name]]) if x.dim() else x + second[name] for name, x in first.items()}
    same(f"with the pairs cut into {case.cut} and {len(pairs) - case.cut}", added, whole)


def prefers_the_chosen(subject: PreferenceSubject, case: PairCase) -> None:
    """No step away from the chosen or towards the rejected response. Not a law: a loss may hold a margin, as ipo does."""
    away = subject.evaluate(case)["the gradient"] * torch.tensor([1.0, -1.0], dtype=torch.float64)
    if (away > TOLERANCE).any():
        raise Violation("the gradient lowers the chosen response's log-prob, or raises the rejected one's")


PAIR_PROPERTIES: dict[str, Property] = {
    "one number a pair": is_per_pair,
    "finite": is_finite,
    "order of pairs": ignores_the_order_of_pairs,
    "micro-batches and ranks": adds_up_over_parts,
}
PAIR_WARNINGS: dict[str, Property] = {"prefers the chosen": prefers_the_chosen}
