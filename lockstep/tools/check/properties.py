"""What holds for every policy loss, preference loss and advantage estimator: how rows are batched never changes the numbers.

A property is a function of a subject (the loss or estimator with its parameters) and a case (a small batch, and a way to cut and
reorder it). It raises `Violation`, which says what went wrong, or returns nothing. The test-suite runs these on everything that is
registered, `lockstep check` on a function of yours, and prints the docstring of a property that does not hold.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lockstep.algorithms.masking import zero_outside
from lockstep.tools.check.subjects import (
    AdvantageSubject,
    Case,
    LossSubject,
    PartedSubject,
    PreferenceSubject,
    Results,
    Subject,
    Violation,
)

TOLERANCE = 1e-9
"""Relative and absolute, of sums in float64 that are taken in another order."""
_ROUNDING = 1e-7
"""A change of a log-prob as float32 makes it."""
_ROUNDING_TOLERANCE = 1e-4
"""A change of a gradient that is not seen in training."""
_EXTRA_COLUMNS = 2

Property = Callable[[Any, Case], None]
"""Its first argument is the kind of subject that it is about."""


def is_per_token(subject: Subject, case: Case) -> None:
    """The results have one number per token; means are taken later, over the whole mini-batch."""
    subject.evaluate(_clean(case))


def is_finite(subject: Subject, case: Case) -> None:
    """Finite numbers give finite results (a loss: its gradient too), and none outside the mask."""
    for name, x in subject.evaluate(_clean(case)).items():
        if not x.isfinite().all():
            raise Violation(f"not finite: {name}")
        if x.dim() and x[~case.mask].any():
            raise Violation(f"not 0 outside the mask: {name}; clean the inputs with masking.zero_outside")


def ignores_masked_tokens(subject: Subject, case: Case) -> None:
    """What lies under the zeros of the mask, NaN too, changes nothing."""
    garbage = {name: torch.where(case.mask, x, torch.nan) for name, x in case.tokens.items()}
    changed = subject.evaluate(replace(case, tokens=garbage))
    _same("with NaN under the mask", changed, subject.evaluate(_clean(case)))


def ignores_padding(subject: Subject, case: Case) -> None:
    """More columns on the right change nothing."""
    tokens = {name: _widened(x, torch.nan) for name, x in case.tokens.items()}
    wide = replace(case, tokens=tokens, mask=_widened(case.mask, False), is_wide=True)
    expected = {name: _widened(x, 0.0) if x.dim() else x for name, x in subject.evaluate(case).items()}
    _same(f"with {_EXTRA_COLUMNS} more columns of padding", subject.evaluate(wide), expected)


def ignores_the_order_of_rows(subject: Subject, case: Case) -> None:
    """Rows in another order keep their own results, and a loss its value."""
    _same_rows(f"with the rows in the order {case.order}", subject, case, case.order)


def ignores_empty_rows(subject: AdvantageSubject, case: Case) -> None:
    """A row without a token of the policy (empty, rejected, without a reward) changes no other row."""
    kept = case.mask.any(dim=1).nonzero().flatten().tolist()
    _same_rows("without the rows that have no token", subject, case, kept)


def adds_up_over_parts(subject: PartedSubject, case: Case) -> None:
    """Micro-batches and ranks: the losses and gradients of the parts of a mini-batch add up to those of the whole."""
    rows = list(range(len(case.mask)))
    whole, first, second = subject.of_parts(case, [rows, rows[: case.cut], rows[case.cut :]])
    added = {}
    for name, x in first.items():
        added[name] = torch.cat([x, second[name]]) if x.dim() else x + second[name]
    _same(f"with the rows cut into {case.cut} and {len(rows) - case.cut}", added, whole)


def ignores_rounding(subject: LossSubject, case: Case) -> None:
    """Before the first step of a batch new and old log-probs are the same but for rounding, which must not steer the gradient."""
    tokens = _clean(case).tokens
    old = tokens["old_log_prob"]
    noise = _ROUNDING * torch.ones_like(old).cumsum(0).cumsum(1).remainder(2).sub(0.5).mul(2)

    def gradient_at(log_prob: Tensor) -> Tensor:
        return subject.evaluate(replace(case, tokens=tokens | {"log_prob": log_prob}))["the gradient"]

    gradient = gradient_at(old)
    rounded = gradient_at(old + zero_outside(noise, case.mask))
    if not torch.allclose(gradient, rounded, rtol=0, atol=_ROUNDING_TOLERANCE):
        raise Violation(
            f"where log_prob is old_log_prob, a change of {_ROUNDING:g} changes the gradient:\n  before {_shown(gradient)}\n"
            f"  after  {_shown(rounded)}"
        )


def without_advantage_is_flat(subject: LossSubject, case: Case) -> None:
    """Where all advantages are 0 there is nothing to learn. Not a law: a loss may have a term of its own, as dro has."""
    tokens = {**_clean(case).tokens, "advantages": torch.zeros_like(case.tokens["advantages"])}
    gradient = subject.evaluate(replace(case, tokens=tokens))["the gradient"]
    if (gradient.abs() > TOLERANCE).any():
        raise Violation("the gradient is not 0 although every advantage is")


def takes_discounts_by_token(subject: AdvantageSubject, case: Case) -> None:
    """Episodes with algorithm.discount_unit=turn: gamma and lam come as a number for each token, and where these are all the same they do
    what one number does. An estimator that cannot take them works with discounts by token, the default."""
    numbers = {name: subject.parameters[name] for name in ("gamma", "lam") if name in subject.parameters}
    others = {name: value for name, value in subject.parameters.items() if name not in numbers}
    by_token = {name: torch.full(case.mask.shape, float(value), dtype=torch.float64) for name, value in numbers.items()}
    changed = replace(subject, parameters=others).evaluate(replace(case, tokens=case.tokens | by_token))
    _same("with gamma and lam by token", changed, subject.evaluate(case))


def is_per_pair(subject: PreferenceSubject, case: Case) -> None:
    """The loss has one number per pair (or per response), the rewards one per response; means are taken later, over the mini-batch."""
    subject.evaluate(case)


def prefers_the_chosen(subject: PreferenceSubject, case: Case) -> None:
    """No step away from the chosen or towards the rejected response. Not a law: a loss may hold a margin, as ipo does."""
    away = subject.evaluate(case)["the gradient"] * torch.tensor([1.0, -1.0], dtype=torch.float64)
    if (away > TOLERANCE).any():
        raise Violation("the gradient lowers the chosen response's log-prob, or raises the rejected one's")


_SHARED: dict[str, Property] = {
    "one number per token": is_per_token,
    "finite": is_finite,
    "masked tokens": ignores_masked_tokens,
    "padding": ignores_padding,
    "order of rows": ignores_the_order_of_rows,
}
LOSS_PROPERTIES: dict[str, Property] = {**_SHARED, "micro-batches and ranks": adds_up_over_parts, "rounding": ignores_rounding}
LOSS_WARNINGS: dict[str, Property] = {"no advantage, no gradient": without_advantage_is_flat}
ADVANTAGE_PROPERTIES: dict[str, Property] = {**_SHARED, "empty rows": ignores_empty_rows}
ADVANTAGE_WARNINGS: dict[str, Property] = {"discounts by turn": takes_discounts_by_token}
PAIR_PROPERTIES: dict[str, Property] = {
    "one number per pair": is_per_pair,
    "finite": is_finite,
    "order of pairs": ignores_the_order_of_rows,
    "micro-batches and ranks": adds_up_over_parts,
}
PAIR_WARNINGS: dict[str, Property] = {"prefers the chosen": prefers_the_chosen}


def _clean(case: Case) -> Case:
    return replace(case, tokens={name: zero_outside(x, case.mask) for name, x in case.tokens.items()})


def _widened(x: Tensor, filler: float) -> Tensor:
    return torch.nn.functional.pad(x, (0, _EXTRA_COLUMNS), value=filler)


def _same_rows(change: str, subject: Subject, case: Case, rows: list[int]) -> None:
    """Raise Violation unless these rows alone, in this order, have the results that they have in the whole batch."""
    expected = {name: x[rows] if x.dim() else x for name, x in subject.evaluate(case).items()}
    _same(change, subject.evaluate(case.select(rows)), expected)


def _same(change: str, actual: Results, expected: Results) -> None:
    for name, y in expected.items():
        x = actual[name]
        if x.shape != y.shape or not torch.allclose(x, y, rtol=TOLERANCE, atol=TOLERANCE):
            raise Violation(f"{change}, {name} changes:\n  before {_shown(y)}\n  after  {_shown(x)}")


def _shown(x: Tensor) -> str:
    if not x.dim():
        return f"{x.item():.6g}"
    return str([[round(v, 6) for v in row] for row in x.tolist()])
