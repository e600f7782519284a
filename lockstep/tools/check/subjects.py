"""A loss or an estimator as the properties see it: a function of a small batch that returns named tensors.

Properties compare padded blocks [B, T]. A function of flat columns gets the blocks' tokens end to end, and its results are put into blocks
again.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from lockstep.algorithms.aggregation import Denominators, agg_loss
from lockstep.algorithms.binding import Bound
from lockstep.algorithms.policy_losses import REMEDY, bind_prepare, takes_blocks
from lockstep.algorithms.preference_losses import bind_preference_loss, bind_preference_prepare, takes_pairs
from lockstep.algorithms.registry import input_names
from lockstep.algorithms.rows import Rows

_SCALE_FACTOR = 5.0

Results = dict[str, Tensor]
"""What a subject makes of a case, by name: a number of the whole batch [], or one number per token [B, T]."""


class Violation(AssertionError):
    """A property does not hold, and why."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A batch, and what is done to it. Of preference losses it is a mini-batch of P pairs, whose two "tokens" are chosen and rejected."""

    tokens: dict[str, Tensor]
    """float64 [B, T] each."""
    of_rows: dict[str, Tensor]
    """[B, ...] each; has `row_keys` (int64, different for each row) for a loss, `group` for an estimator."""
    mask: Tensor
    """bool [B, T]."""
    order: list[int]
    """Another order of the rows."""
    is_wide: bool = False
    """Whether a function of flat columns gets the masked tokens at the ends of rows. By default it does not, so that lengths differ."""
    mode: str = ""
    """The `loss_agg_mode` of a loss."""
    cut: int = 0
    """Rows before this one are the first micro-batch (or rank) of a loss, the others the second."""

    @cached_property
    def rows(self) -> Rows:
        """The rows of its flat columns."""
        ends = torch.full_like(self.mask, True) if self.is_wide else self.mask
        return Rows((ends * torch.arange(1, self.mask.shape[1] + 1)).amax(1))

    def flat(self, blocks: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the blocks [B, T] as flat columns."""
        return {name: self.rows.unpad(x) for name, x in blocks.items()}

    def block(self, x: Tensor) -> Tensor:
        """Return a flat column as [B, T], with zeros at the tokens that are not in it."""
        return x.new_zeros(self.mask.shape).index_put((self.rows.index, self.rows.positions), x)

    def select(self, rows: list[int]) -> "Case":
        """Return a case of these rows alone."""
        tokens = {name: x[rows] for name, x in self.tokens.items()}
        of_rows = {name: x[rows] for name, x in self.of_rows.items()}
        return replace(self, tokens=tokens, of_rows=of_rows, mask=self.mask[rows])


class Subject(Protocol):
    """What is checked: a function with its parameters."""

    def evaluate(self, case: Case) -> Results:
        """Return what the function makes of the whole batch. Raises Violation if that is not one number per token (or pair)."""
        ...


class PartedSubject(Subject, Protocol):
    """A loss: a mini-batch of it comes in parts, micro-batches or ranks."""

    def of_parts(self, case: Case, parts: list[list[int]]) -> list[Results]:
        """Return the results of each of these parts (numbers of rows) of a mini-batch."""
        ...


@dataclass(frozen=True)
class LossSubject:
    """A policy loss and its parameters: the aggregated loss, its gradient by log_prob, and the metrics."""

    loss: Callable[..., tuple[Tensor, dict[str, Tensor]]]
    parameters: Mapping[str, Any]

    def evaluate(self, case: Case) -> Results:
        """See Subject."""
        return self.of_parts(case, [list(range(len(case.mask)))])[0]

    def of_parts(self, case: Case, parts: list[list[int]]) -> list[Results]:
        """See PartedSubject."""
        known = {name: x for name, x in case.tokens.items() if name != "log_prob"} | {"response_mask": case.mask}
        prepare = bind_prepare(self.loss, self.parameters)
        columns = {} if prepare is None else prepare({**case.flat(known), **case.of_rows}, case.rows)
        prepared = replace(case, tokens=case.tokens | {name: case.block(x) for name, x in columns.items()})
        denominators = Denominators.of(case.mask.flatten(), Rows.of_padded(case.mask))
        return [self._part(prepared.select(part), denominators) for part in parts]

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
        if gradient is None:
            gradient = torch.zeros_like(log_prob)
        return {"the loss": total.detach(), "the gradient": gradient, **results}


@dataclass(frozen=True)
class AdvantageSubject:
    """An estimator and its parameters: advantages and returns."""

    estimator: Callable[..., tuple[Tensor, Tensor]]
    parameters: Mapping[str, Any]

    def evaluate(self, case: Case) -> Results:
        """See Subject."""
        what = "the advantage estimator"
        are_blocks = "rows" not in input_names(what, self.estimator)
        index = case.of_rows["group"].numpy().astype(str).astype(object)
        bound = Bound(what, self.estimator, {**self.parameters, **case.of_rows, "index": index}, "no run has it")
        advantages, returns = _call(bound, case, are_blocks)
        return _blocks(case, {"advantages": advantages, "returns": returns}, are_blocks)


@dataclass(frozen=True)
class PreferenceSubject:
    """A preference loss: its mean over the mini-batch, its gradient by log_prob [P, 2], and the rewards [P, 2]."""

    loss: Callable[..., tuple[Tensor, Tensor]]
    parameters: Mapping[str, Any]

    def evaluate(self, case: Case) -> Results:
        """See Subject."""
        return self.of_parts(case, [list(range(len(case.mask)))])[0]

    def of_parts(self, case: Case, parts: list[list[int]]) -> list[Results]:
        """See PartedSubject."""
        columns = case.tokens | {"is_chosen": torch.tensor([True, False]).expand(case.mask.shape)}
        prepare = bind_preference_prepare(self.loss, self.parameters)
        if prepare is not None:
            prepared = prepare({name: x.flatten() for name, x in columns.items()}, None)
            columns |= {name: x.reshape(case.mask.shape) for name, x in prepared.items()}
        num_units = len(case.mask) if takes_pairs(self.loss) else case.mask.numel()
        whole = replace(case, tokens=columns)
        return [self._part(whole.select(part).tokens, num_units) for part in parts]

    def _part(self, columns: Mapping[str, Tensor], num_units: int) -> Results:
        log_prob = columns["log_prob"].clone().requires_grad_()
        given = {**columns, "log_prob": log_prob}
        if not takes_pairs(self.loss):
            given = {name: x.flatten() for name, x in given.items()}
        loss, rewards = bind_preference_loss(self.loss, self.parameters)(given, None)
        shape = given["log_prob"].shape
        if loss.shape != shape[:1] or rewards.shape != shape:
            raise Violation(
                f"the loss must be {tuple(shape[:1])} and the rewards {tuple(shape)}, but they are {tuple(loss.shape)} and "
                f"{tuple(rewards.shape)}: return the loss before any mean, which is taken over the whole mini-batch"
            )
        total = loss.sum() / num_units
        gradient = torch.autograd.grad(total, log_prob)[0] if total.requires_grad else torch.zeros_like(log_prob)
        return {"the loss": total.detach(), "the gradient": gradient, "the rewards": rewards.detach().reshape(log_prob.shape)}


def _call(bound: Bound, case: Case, are_blocks: bool) -> Any:
    """Call the function with blocks, or with flat columns and the rows if it names them."""
    blocks = case.tokens | {"response_mask": case.mask}
    return bound(blocks if are_blocks else case.flat(blocks), case.rows)


def _blocks(case: Case, results: Mapping[str, Any], are_blocks: bool, hint: str = "") -> Results:
    """Return the results as blocks. Raises Violation, ending with `hint`, if a result does not have one number per token."""
    shape = tuple(case.mask.shape) if are_blocks else (case.rows.num_tokens,)
    for name, x in results.items():
        if not isinstance(x, Tensor) or x.shape != shape:
            got = f"shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
            raise Violation(f"{name} must have one number per token, {shape}, but has {got}{hint}")
    return {name: x if are_blocks else case.block(x) for name, x in results.items()}
