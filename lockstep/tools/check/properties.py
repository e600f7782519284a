"""What holds for every policy loss and every advantage estimator: how rows are batched never changes the numbers.

A property is a function of a subject (the loss or estimator with its parameters) and a case (a small batch, and a way to cut and
reorder it). It raises `Violation`, which says what went wrong, or returns nothing. The test-suite runs these on everything that is
registered, `lockstep check` on a function of yours. Properties compare padded blocks; a function of flat columns gets the blocks'
tokens end to end, and its results are put into blocks again.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from lockstep.algorithms.aggregation import Denominators, agg_loss
from lockstep.algorithms.binding import Bound
from lockstep.algorithms.masking import zero_outside
from lockstep.algorithms.policy_losses import REMEDY, bind_prepare, takes_blocks
from lockstep.algorithms.registry import input_names
from lockstep.algorithms.rows import Rows

TOLERANCE = 1e-9
"""Relative and absolute, of sums in float64 that are taken in another order."""
_ROUNDING, _ROUNDING_TOLERANCE = 1e-7, 1e-4
"""A change of a log-prob as float32 makes it, and of a gradient that is not seen in training."""
_EXTRA_COLUMNS = 2
_SCALE_FACTOR = 5.0

Results = dict[str, Tensor]
"""What a subject makes of a case, by name: a number of the whole batch [], or one number per token [B, T]."""


class Violation(AssertionError):
    """A property does not hold, and why."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A batch, and what is done to it."""

    tokens: dict[str, Tensor]
    """float64 [B, T] each."""
    of_rows: dict[str, Tensor]
    """[B, ...] each; has `row_keys` (int64, one of its own for each row) for a loss, `group` for an estimator."""
    mask: Tensor
    """bool [B, T]."""
    order: list[int]
    """Another order of the rows."""
    is_wide: bool = False
    """Whether a function of flat columns gets the masked tokens at the ends of rows. It does not otherwise, so that lengths differ."""
    mode: str = ""
    """A loss: its `loss_agg_mode`."""
    cut: int = 0
    """A loss: rows before this one are the first micro-batch (or rank), the others the second."""

    @cached_property
    def rows(self) -> Rows:
        """The rows of its flat columns."""
        ends = torch.full_like(self.mask, True) if self.is_wide else self.mask
        return Rows((ends * torch.arange(1, self.mask.shape[1] + 1)).amax(1))

    def flat(self, blocks: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The blocks [B, T] as flat columns."""
        return {name: self.rows.unpad(x) for name, x in blocks.items()}

    def block(self, x: Tensor) -> Tensor:
        """A flat column as [B, T], with zeros at the tokens that are not in it."""
        return x.new_zeros(self.mask.shape).index_put((self.rows.index, self.rows.positions), x)


@dataclass(frozen=True)
class LossSubject:
    """A policy loss and the numbers it is called with: the aggregated loss, its gradient by log_prob, and the metrics."""

    loss: Callable[..., tuple[Tensor, dict[str, Tensor]]]
    parameters: Mapping[str, Any]

    def evaluate(self, case: Case) -> Results:
        """What it makes of the whole batch. Raises Violation when that is not one number per token."""
        return self.of_parts(case, [list(range(len(case.mask)))])[0]

    def of_parts(self, case: Case, parts: list[list[int]]) -> list[Results]:
        """The results of each of these parts of a mini-batch."""
        known = {name: x for name, x in case.tokens.items() if name != "log_prob"} | {"response_mask": case.mask}
        prepare = bind_prepare(self.loss, self.parameters)
        columns = {} if prepare is None else prepare({**case.flat(known), **case.of_rows}, case.rows)
        prepared = replace(case, tokens=case.tokens | {name: case.block(x) for name, x in columns.items()})
        denominators = Denominators.of(case.mask.flatten(), Rows.of_padded(case.mask))
        return [self._part(select(prepared, part), denominators) for part in parts]

    def _part(self, case: Case, denominators: Denominators) -> Results:
        log_prob = case.tokens["log_prob"].clone().requires_grad_()
        are_blocks = takes_blocks(self.loss)
        bound = Bound("the policy loss", self.loss, self.parameters, REMEDY)
        loss, metrics = _call(bound, replace(case, tokens=case.tokens | {"log_prob": log_prob}), are_blocks)
        named = {"the loss": loss} | {f"metric {name!r}": x for name, x in metrics.items()}
        hint = ": return it before any mean, agg_loss divides by the counts of the whole mini-batch"
        results = _blocks(case, named, are_blocks, hint)
        per_token = results.pop("the loss")
        if any(x.requires_grad for x in results.values()):
            raise Violation("metrics must be detached: they would keep the graph alive")
        rows = Rows.of_padded(case.mask)
        total = agg_loss(per_token.flatten(), case.mask.flatten(), case.mode, denominators, rows, _SCALE_FACTOR)
        gradient = None
        if total.requires_grad:
            (gradient,) = torch.autograd.grad(total, log_prob, allow_unused=True)
        return {"the loss": total.detach(), "the gradient": torch.zeros_like(log_prob) if gradient is None else gradient, **results}


@dataclass(frozen=True)
class AdvantageSubject:
    """An estimator and the numbers it is called with: advantages and returns."""

    estimator: Callable[..., tuple[Tensor, Tensor]]
    parameters: Mapping[str, Any]

    def evaluate(self, case: Case) -> Results:
        """As a loss does."""
        what = "the advantage estimator"
        are_blocks = "rows" not in input_names(what, self.estimator)
        others = {**self.parameters, **case.of_rows, "index": case.of_rows["group"].numpy().astype(str).astype(object)}
        result = _call(Bound(what, self.estimator, others, "no run has it"), case, are_blocks)
        return _blocks(case, dict(zip(("advantages", "returns"), result, strict=True)), are_blocks)


Subject = Any
"""A LossSubject, an AdvantageSubject, or one of pairs."""
Property = Callable[[Any, Any], None]


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


def adds_up_over_parts(subject: LossSubject, case: Case) -> None:
    """Micro-batches and ranks: the losses and gradients of the parts of a mini-batch add up to those of the whole."""
    rows = list(range(len(case.mask)))
    whole, first, second = subject.of_parts(case, [rows, rows[: case.cut], rows[case.cut :]])
    added = {name: torch.cat([x, second[name]]) if x.dim() else x + second[name] for name, x in first.items()}
    _same(f"with the rows cut into {case.cut} and {len(rows) - case.cut}", added, whole)


def ignores_rounding(subject: LossSubject, case: Case) -> None:
    """Before the first step of a batch new and old log-probs are the same but for rounding, which must not steer the gradient."""
    tokens = _clean(case).tokens
    old = tokens["old_log_prob"]
    noise = _ROUNDING * torch.ones_like(old).cumsum(0).cumsum(1).remainder(2).sub(0.5).mul(2)
    same, rounded = (
        subject.evaluate(replace(case, tokens=tokens | {"log_prob": old + zero_outside(change, case.mask)}))
        for change in (torch.zeros_like(old), noise)
    )
    if not torch.allclose(same["the gradient"], rounded["the gradient"], rtol=0, atol=_ROUNDING_TOLERANCE):
        raise Violation(
            f"where log_prob is old_log_prob, a change of {_ROUNDING:g} changes the gradient:\n  before {_shown(same['the gradient'])}\n"
            f"  after  {_shown(rounded['the gradient'])}"
        )


def without_advantage_is_flat(subject: LossSubject, case: Case) -> None:
    """Where all advantages are 0 there is nothing to learn. Not a law: a loss may have a term of its own, as dro has."""
    tokens = {**_clean(case).tokens, "advantages": torch.zeros_like(case.tokens["advantages"])}
    if (subject.evaluate(replace(case, tokens=tokens))["the gradient"].abs() > TOLERANCE).any():
        raise Violation("the gradient is not 0 although every advantage is")


def takes_discounts_by_token(subject: AdvantageSubject, case: Case) -> None:
    """Episodes with algorithm.discount_unit=turn: gamma and lam come as a number for each token, and where these are all the same they do
    what one number does. An estimator that cannot take them works with discounts by token, the default."""
    numbers = {name: subject.parameters[name] for name in ("gamma", "lam") if name in subject.parameters}
    others = {name: value for name, value in subject.parameters.items() if name not in numbers}
    by_token = {name: torch.full(case.mask.shape, float(value), dtype=torch.float64) for name, value in numbers.items()}
    changed = replace(subject, parameters=others).evaluate(replace(case, tokens=case.tokens | by_token))
    _same("with gamma and lam by token", changed, subject.evaluate(case))


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


def _call(bound: Bound, case: Case, are_blocks: bool) -> Any:
    """Call the function with blocks, or with flat columns and the rows if it names them."""
    blocks = case.tokens | {"response_mask": case.mask}
    return bound(blocks if are_blocks else case.flat(blocks), case.rows)


def _blocks(case: Case, results: Mapping[str, Any], are_blocks: bool, hint: str = "") -> Results:
    """The results as blocks. Raises Violation, ending with `hint`, when one does not have one number per token."""
    shape = tuple(case.mask.shape) if are_blocks else (case.rows.num_tokens,)
    for name, x in results.items():
        if not isinstance(x, Tensor) or x.shape != shape:
            got = f"shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
            raise Violation(f"{name} must have one number per token, {shape}, but has {got}{hint}")
    return {name: x if are_blocks else case.block(x) for name, x in results.items()}


def _clean(case: Case) -> Case:
    return replace(case, tokens={name: zero_outside(x, case.mask) for name, x in case.tokens.items()})


def select(case: Case, rows: list[int]) -> Case:
    """These rows of the case alone."""
    tokens, others = ({name: x[rows] for name, x in part.items()} for part in (case.tokens, case.of_rows))
    return replace(case, tokens=tokens, of_rows=others, mask=case.mask[rows])


def _widened(x: Tensor, filler: float) -> Tensor:
    return torch.nn.functional.pad(x, (0, _EXTRA_COLUMNS), value=filler)


def _same_rows(change: str, subject: Subject, case: Case, rows: list[int]) -> None:
    """These rows alone, in this order, have the results that they have in the whole batch."""
    expected = {name: x[rows] if x.dim() else x for name, x in subject.evaluate(case).items()}
    _same(change, subject.evaluate(select(case, rows)), expected)


def _same(change: str, actual: Results, expected: Results) -> None:
    for name, y in expected.items():
        x = actual[name]
        if x.shape != y.shape or not torch.allclose(x, y, rtol=TOLERANCE, atol=TOLERANCE):
            raise Violation(f"{change}, {name} changes:\n  before {_shown(y)}\n  after  {_shown(x)}")


def _shown(x: Tensor) -> str:
    return str([[round(v, 6) for v in row] for row in x.tolist()]) if x.dim() else f"{x.item():.6g}"
