"""What holds for every policy loss and every advantage estimator: how rows are batched never changes the numbers.

A property is a function of a subject (the loss or estimator with its parameters) and a case (a small batch, and a way to cut and
reorder it). It raises `Violation`, which says what went wrong, or returns nothing. The test-suite runs these on everything that is
registered, `lockstep check` on a function of yours. Properties compare padded blocks; a function of flat columns gets the blocks'
tokens end to end, and its results are put into blocks again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from lockstep.algorithms.aggregation import Denominators, agg_loss
from lockstep.algorithms.bound import Bound
from lockstep.algorithms.masked import zero_outside
from lockstep.algorithms.policy_losses import REMEDY, bind_policy_loss, bind_prepare, takes_blocks
from lockstep.algorithms.registry import input_names
from lockstep.algorithms.rows import Rows

TOLERANCE = 1e-9
"""Relative and absolute, of sums in float64 that are taken in another order."""
_EXTRA_COLUMNS = 2
_SCALE_FACTOR = 5.0


C = TypeVar("C", bound="Case")

SHAPES = "one number a token"
"""The property without which the others say nothing."""


class Violation(AssertionError):
    """A property does not hold, and why."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A batch, and what is done to it."""

    tokens: dict[str, Tensor]
    """float64 [B, T] each."""
    mask: Tensor
    """bool [B, T]."""
    order: list[int]
    """Another order of the rows."""
    is_wide: bool = False
    """Whether a function of flat columns gets the masked tokens at the ends of rows. It does not otherwise, so that lengths differ."""

    def rows(self) -> Rows:
        """The rows of its flat columns."""
        ends = torch.full_like(self.mask, True) if self.is_wide else self.mask
        return Rows((ends * torch.arange(1, self.mask.shape[1] + 1)).amax(1))

    def block(self, x: Tensor) -> Tensor:
        """A flat column as [B, T], with zeros at the tokens that are not in it."""
        rows = self.rows()
        return x.new_zeros(self.mask.shape).index_put((rows.index, rows.positions), x)


@dataclass(frozen=True, kw_only=True)
class LossCase(Case):
    """A mini-batch for a loss; the gradient is taken of the tokens' `log_prob`."""

    row_keys: Tensor
    """int64 [B], one of its own for each row."""
    mode: str
    """A `loss_agg_mode`."""
    cut: int
    """Rows before this one are the first micro-batch (or rank), the others the second."""


@dataclass(frozen=True)
class LossSubject:
    """A policy loss with the numbers it is called with."""

    loss: Callable[..., tuple[Tensor, dict[str, Tensor]]]
    parameters: Mapping[str, Any]

    def prepared(self, case: LossCase) -> dict[str, Tensor]:
        """The columns of the loss's `prepare` for the whole mini-batch, as blocks."""
        known = {name: x for name, x in case.tokens.items() if name != "log_prob"} | {"response_mask": case.mask}
        prepare = bind_prepare(self.loss, self.parameters)
        columns = {} if prepare is None else prepare({**_flat(case, known), "row_keys": case.row_keys}, case.rows())
        return {name: case.block(x) for name, x in columns.items()}

    def evaluate(
        self, case: LossCase, extra: Mapping[str, Tensor], denominators: Denominators
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """The aggregated loss, its gradient by log_prob [B, T], and the metrics [B, T]."""
        log_prob = case.tokens["log_prob"].clone().requires_grad_()
        tokens = {**case.tokens, **extra, "log_prob": log_prob, "response_mask": case.mask}
        if takes_blocks(self.loss):
            loss, metrics = Bound("the policy loss", self.loss, self.parameters, REMEDY, takes_blocks=False)(tokens, None)
        else:
            loss, metrics = bind_policy_loss(self.loss, self.parameters)(_flat(case, tokens), case.rows())
        named = {"the loss": loss} | {f"metric {name!r}": x for name, x in metrics.items()}
        hint = ": return it before any mean, agg_loss divides by the counts of the whole mini-batch"
        loss, *others = _blocks(case, named, takes_blocks(self.loss), hint)
        if any(x.requires_grad for x in others):
            raise Violation("metrics must be detached: they would keep the graph alive")
        rows = Rows.of_padded(case.mask)
        total = agg_loss(loss.flatten(), case.mask.flatten(), case.mode, denominators, rows, _SCALE_FACTOR)
        gradient = torch.zeros_like(log_prob)
        if total.requires_grad:
            (found,) = torch.autograd.grad(total, log_prob, allow_unused=True)
            gradient = gradient if found is None else found
        return total.detach(), gradient, dict(zip(metrics, others, strict=True))

    def whole(self, case: LossCase) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """The same for the whole mini-batch."""
        return self.evaluate(case, self.prepared(case), _denominators(case))


def loss_is_per_token(subject: LossSubject, case: LossCase) -> None:
    """The loss and the metrics have one number a token; means are taken later, over the whole mini-batch."""
    subject.whole(_clean(case))


def loss_is_finite(subject: LossSubject, case: LossCase) -> None:
    """Finite numbers give a finite loss and a finite gradient, and none outside the mask."""
    total, gradient, metrics = subject.whole(_clean(case))
    for name, x in {"the loss": total, "the gradient": gradient, **{f"metric {n!r}": x for n, x in metrics.items()}}.items():
        if not x.isfinite().all():
            raise Violation(f"{name} is not finite")
    outside = [gradient, *metrics.values()]
    if any(x[~case.mask].any() for x in outside):
        raise Violation("masked tokens have a gradient or a metric; clean the inputs with masked.zero_outside")


def loss_ignores_masked_tokens(subject: LossSubject, case: LossCase) -> None:
    """What lies under the zeros of the mask, NaN too, changes nothing."""
    garbage = {name: torch.where(case.mask, x, torch.nan) for name, x in case.tokens.items()}
    _same("with NaN under the mask", subject.whole(dataclasses.replace(case, tokens=garbage)), subject.whole(_clean(case)))


def loss_ignores_padding(subject: LossSubject, case: LossCase) -> None:
    """More columns on the right change nothing."""
    total, gradient, metrics = subject.whole(case)
    expected = (total, _widened(gradient, 0.0), {name: _widened(x, 0.0) for name, x in metrics.items()})
    _same(f"with {_EXTRA_COLUMNS} more columns of padding", subject.whole(_wide(case)), expected)


def loss_ignores_the_order_of_rows(subject: LossSubject, case: LossCase) -> None:
    """Rows in another order have the same loss and their own gradients."""
    total, gradient, metrics = subject.whole(case)
    expected = (total, gradient[case.order], {name: x[case.order] for name, x in metrics.items()})
    _same(f"with the rows in the order {case.order}", subject.whole(_rows(case, case.order)), expected)


def loss_adds_up_over_parts(subject: LossSubject, case: LossCase) -> None:
    """Micro-batches and ranks: the losses and gradients of the parts of a mini-batch add up to those of the whole."""
    extra, denominators = subject.prepared(case), _denominators(case)
    total, gradient, metrics = subject.evaluate(case, extra, denominators)
    rows = list(range(len(case.mask)))
    parts = [
        subject.evaluate(_rows(case, part), {name: x[part] for name, x in extra.items()}, denominators)
        for part in (rows[: case.cut], rows[case.cut :])
    ]
    added = (
        parts[0][0] + parts[1][0],
        torch.cat([part[1] for part in parts]),
        {name: torch.cat([part[2][name] for part in parts]) for name in metrics},
    )
    _same(f"with the rows cut into {case.cut} and {len(rows) - case.cut}", added, (total, gradient, metrics))


def loss_without_advantage_is_flat(subject: LossSubject, case: LossCase) -> None:
    """Where all advantages are 0 there is nothing to learn. Not a law: a loss may have a term of its own, as dro has."""
    tokens = {**_clean(case).tokens, "advantages": torch.zeros_like(case.tokens["advantages"])}
    if (subject.whole(dataclasses.replace(case, tokens=tokens))[1].abs() > TOLERANCE).any():
        raise Violation("the gradient is not 0 although every advantage is")


LOSS_PROPERTIES: dict[str, Callable[[LossSubject, LossCase], None]] = {
    SHAPES: loss_is_per_token,
    "finite": loss_is_finite,
    "masked tokens": loss_ignores_masked_tokens,
    "padding": loss_ignores_padding,
    "order of rows": loss_ignores_the_order_of_rows,
    "micro-batches and ranks": loss_adds_up_over_parts,
}
LOSS_WARNINGS: dict[str, Callable[[LossSubject, LossCase], None]] = {"no advantage, no gradient": loss_without_advantage_is_flat}


@dataclass(frozen=True, kw_only=True)
class AdvantageCase(Case):
    """A batch for an estimator."""

    of_rows: dict[str, Tensor]
    """[B, ...] each; has `group`."""


@dataclass(frozen=True)
class AdvantageSubject:
    """An estimator with the numbers it is called with."""

    estimator: Callable[..., tuple[Tensor, Tensor]]
    parameters: Mapping[str, Any]

    def evaluate(self, case: AdvantageCase) -> tuple[Tensor, Tensor]:
        """Advantages and returns, [B, T] each."""
        what = "the advantage estimator"
        is_flat = "rows" in input_names(what, self.estimator)
        tokens = {**case.tokens, "response_mask": case.mask}
        index = case.of_rows["group"].numpy().astype(str).astype(object)
        available = {**self.parameters, **(_flat(case, tokens) if is_flat else tokens), **case.of_rows, "index": index}
        result = Bound(what, self.estimator, {}, "no run has it", takes_blocks=False)(available, case.rows() if is_flat else None)
        advantages, returns = _blocks(case, dict(zip(("advantages", "returns"), result, strict=True)), not is_flat)
        return advantages, returns


def advantage_is_per_token(subject: AdvantageSubject, case: AdvantageCase) -> None:
    """Advantages and returns have one number a token."""
    subject.evaluate(_clean(case))


def advantage_is_finite(subject: AdvantageSubject, case: AdvantageCase) -> None:
    """Finite inputs give finite advantages and returns, and 0 outside the mask."""
    for name, x in zip(("advantages", "returns"), subject.evaluate(_clean(case)), strict=True):
        if not x.isfinite().all():
            raise Violation(f"{name} are not finite")
        if x[~case.mask].any():
            raise Violation(f"{name} are not 0 outside the mask")


def advantage_ignores_masked_tokens(subject: AdvantageSubject, case: AdvantageCase) -> None:
    """What lies under the zeros of the mask, NaN too, changes nothing."""
    garbage = {name: torch.where(case.mask, x, torch.nan) for name, x in case.tokens.items()}
    changed = subject.evaluate(dataclasses.replace(case, tokens=garbage))
    _same("with NaN under the mask", changed, subject.evaluate(_clean(case)))


def advantage_ignores_padding(subject: AdvantageSubject, case: AdvantageCase) -> None:
    """More columns on the right change nothing."""
    expected = tuple(_widened(x, 0.0) for x in subject.evaluate(case))
    _same(f"with {_EXTRA_COLUMNS} more columns of padding", subject.evaluate(_wide(case)), expected)


def advantage_ignores_the_order_of_rows(subject: AdvantageSubject, case: AdvantageCase) -> None:
    """Rows in another order keep their advantages."""
    expected = tuple(x[case.order] for x in subject.evaluate(case))
    _same(f"with the rows in the order {case.order}", subject.evaluate(_case_rows(case, case.order)), expected)


def advantage_ignores_empty_rows(subject: AdvantageSubject, case: AdvantageCase) -> None:
    """A row without a token of the policy (empty, rejected, without a reward) changes no other row."""
    kept = case.mask.any(dim=1).nonzero().flatten().tolist()
    expected = tuple(x[kept] for x in subject.evaluate(case))
    _same("without the rows that have no token", subject.evaluate(_case_rows(case, kept)), expected)


ADVANTAGE_PROPERTIES: dict[str, Callable[[AdvantageSubject, AdvantageCase], None]] = {
    SHAPES: advantage_is_per_token,
    "finite": advantage_is_finite,
    "masked tokens": advantage_ignores_masked_tokens,
    "padding": advantage_ignores_padding,
    "order of rows": advantage_ignores_the_order_of_rows,
    "empty rows": advantage_ignores_empty_rows,
}


def _flat(case: Case, blocks: Mapping[str, Tensor]) -> dict[str, Tensor]:
    rows = case.rows()
    return {name: rows.unpad(x) for name, x in blocks.items()}


def _blocks(case: Case, results: Mapping[str, Any], are_blocks: bool, hint: str = "") -> list[Tensor]:
    """The results as blocks. Raises Violation, ending with `hint`, when one does not have one number per token."""
    shape = tuple(case.mask.shape) if are_blocks else (case.rows().num_tokens,)
    for name, x in results.items():
        if not isinstance(x, Tensor) or x.shape != shape:
            got = f"shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
            raise Violation(f"{name} must have one number a token, {shape}, but has {got}{hint}")
    return [x if are_blocks else case.block(x) for x in results.values()]


def _denominators(case: LossCase) -> Denominators:
    return Denominators.of(case.mask.flatten(), Rows.of_padded(case.mask))


def _clean(case: C) -> C:
    return dataclasses.replace(case, tokens={name: zero_outside(x, case.mask) for name, x in case.tokens.items()})


def _wide(case: C) -> C:
    tokens = {name: _widened(x, torch.nan) for name, x in case.tokens.items()}
    return dataclasses.replace(case, tokens=tokens, mask=_widened(case.mask, False), is_wide=True)


def _rows(case: LossCase, rows: list[int]) -> LossCase:
    tokens = {name: x[rows] for name, x in case.tokens.items()}
    return dataclasses.replace(case, tokens=tokens, mask=case.mask[rows], row_keys=case.row_keys[rows])


def _case_rows(case: AdvantageCase, rows: list[int]) -> AdvantageCase:
    tokens, others = ({name: x[rows] for name, x in part.items()} for part in (case.tokens, case.of_rows))
    return dataclasses.replace(case, tokens=tokens, of_rows=others, mask=case.mask[rows])


def _widened(x: Tensor, filler: float) -> Tensor:
    return torch.cat([x, torch.full((len(x), _EXTRA_COLUMNS), filler, dtype=x.dtype)], dim=1)


def _same(change: str, actual: Any, expected: Any) -> None:
    names = ("the loss", "its gradient", "a metric") if len(actual) == 3 else ("advantages", "returns")
    for name, a, b in zip(names, actual, expected, strict=True):
        for x, y in zip(_leaves(a), _leaves(b), strict=True):
            if x.shape != y.shape or not torch.allclose(x, y, rtol=TOLERANCE, atol=TOLERANCE):
                raise Violation(f"{change}, {name} changes:\n  before {_shown(y)}\n  after  {_shown(x)}")


def _leaves(x: Any) -> list[Tensor]:
    return list(x.values()) if isinstance(x, dict) else [x]


def _shown(x: Tensor) -> str:
    return str([[round(v, 6) for v in row] for row in x.tolist()]) if x.dim() == 2 else f"{x.item():.6g}"
