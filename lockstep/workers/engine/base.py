"""TrainEngine: one model that computes columns, learns from losses, and gives its weights away. Backends differ in how it is sharded.

The loop over micro-batches is here, once, for every backend. A loss is a sum over denominators that hold for the whole mini-batch
(all ranks, all micro-batches), so how rows are cut never changes it.
"""

from __future__ import annotations

import functools
import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Concatenate, ParamSpec, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from lockstep.errors import NumericalError
from lockstep.models.flops import ModelCost
from lockstep.models.load import Head
from lockstep.models.outputs import sequence_scores, token_log_probs, token_loss, token_values
from lockstep.models.packing import (
    Budget,
    PackedRows,
    cut_into_micro_batches,
    pack_rows,
    pad_rows,
    placeholder_row,
    shared_prompt_tokens,
)
from lockstep.models.token_head import LossParts, TokenHead
from lockstep.observability.metrics import Metric, merge_metrics
from lockstep.protocol import DataProto, Ragged
from lockstep.workers.engine.checkpoint import ModelFolder
from lockstep.workers.engine.made_when_read import MadeWhenRead
from lockstep.workers.engine.model_group import join_rows
from lockstep.workers.engine.pending import Pending, read


@dataclass(frozen=True, slots=True)
class TokenOutputs:
    """What the model said about the response tokens of one micro-batch, padded to [rows, T]; entries beyond a response are 0."""

    log_probs: Tensor | None = None
    """Language model: log-prob of each token."""
    entropy: Tensor | None = None
    """Language model: entropy at each token."""
    values: Tensor | None = None
    """Value model: the value before each token."""


LossFn = Callable[[TokenOutputs, DataProto], tuple[Tensor, dict[str, Metric | Pending]]]
"""(outputs, rows) -> (loss, metrics). The loss of all micro-batches of all ranks adds up to the mini-batch's loss. `rows` is on the
device of the outputs; metrics may be pending there."""


@dataclass(frozen=True, slots=True)
class OptimResult:
    """What one optimizer step did."""

    grad_norm: float
    """Norm of the whole gradient before clipping."""
    lr: float
    """The learning rate it used."""


class LossOf(Protocol):
    """Called once for each part of each micro-batch that this rank has the outputs of."""

    def __call__(self, number: int, columns: dict[str, Tensor], part: int = 0) -> Tensor:
        """The loss of a micro-batch, or of a part of its rows, from the columns of these rows."""
        ...


P = ParamSpec("P")
R = TypeVar("R")
E = TypeVar("E", bound="TrainEngine")


def uses_weights(method: Callable[Concatenate[E, P], R]) -> Callable[Concatenate[E, P], R]:
    """Run an engine's method with its weights on the device."""

    @functools.wraps(method)
    def with_weights(self: E, *args: P.args, **kwargs: P.kwargs) -> R:
        with self.on_device():
            return method(self, *args, **kwargs)

    return with_weights


class TrainEngine(ABC):
    """One model on `world_size` ranks. Every method is called on all ranks together, each with rows of its own.

    Where several ranks compute one model together (tensor, pipeline or sequence parallel: `model_group`) they put their rows together,
    all compute all of them, and each returns those it was given: who calls an engine need not know how it is laid out.
    """

    head: Head
    module: torch.nn.Module
    """The model as the backend wraps it."""
    decoder: PreTrainedModel | None = None
    """A plain module of the same model for generation, where one was asked for; weight_sync.shared fills in its parameters."""
    token_head: TokenHead | None = None
    """The model's output layer, where it can give log-probs without logits."""
    folder: ModelFolder
    """The model as a checkpoint has it."""
    cost: ModelCost
    """What a token costs, for rates."""
    dtype: torch.dtype
    """The type of the computation."""
    device: torch.device
    rank: int
    world_size: int
    model_group: dist.ProcessGroup | None = None
    """The ranks that compute the same rows together; None where each computes its own."""
    gradient_ranks: int
    """The ranks over which the backend averages gradients; a loss is a sum over them."""
    token_ranks: int = 1
    """The ranks among which the tokens of a micro-batch are divided: it may hold so many times the budget."""
    exports_copies: bool = False
    """Whether export_weights makes new tensors even on one rank."""
    reports: bool = True
    """Whether this rank reports the metrics of the rows: one rank of each model group does."""

    # -- what a backend provides -------------------------------------------------------------------------------------------

    @abstractmethod
    def optim_step(self) -> OptimResult:
        """Clip, step, clear the gradients. Raises NumericalError, before any weight changes, when the gradient is not finite."""

    @abstractmethod
    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, whole tensor) of every parameter and saved buffer; a tied weight comes once.

        On one rank the tensors are the parameters themselves, not copies: they follow later updates (unless `exports_copies`).
        """

    @abstractmethod
    def save(self, path: Path) -> None:
        """Write a Hugging Face folder (weights, config) and, for a trained model, what the optimizer needs to go on."""

    @abstractmethod
    def load(self, path: Path) -> None:
        """Read what `save` wrote, at any number of ranks."""

    @abstractmethod
    def gradient_sync(self, enabled: bool) -> AbstractContextManager[None]:
        """Context in which backward passes do (or do not) reduce gradients over the ranks."""

    def on_device(self) -> AbstractContextManager[None]:
        """Context in which the weights are on the device. Every method sees to it by itself; who calls several holds it around them,
        so that an engine which rests in host memory is moved once."""
        return nullcontext()

    def adapter_off(self) -> AbstractContextManager[None]:
        """Context in which the model is the one that training started from. For an engine that trains adapters beside it (LoRA)."""
        raise AssertionError("this engine trains the model itself, so the one it started from is gone")

    # -- what every backend shares -----------------------------------------------------------------------------------------

    @uses_weights
    @torch.no_grad()
    def forward(self, data: DataProto, budget: Budget, temperature: float = 1.0) -> DataProto:
        """The model's columns for these rows: log_probs and entropys, or values. Rows keep their order."""
        self.module.eval()
        data, own = join_rows(data, self.model_group)
        outputs: dict[str, list[Tensor]] = {}
        batches = self._micro_batches(data, budget)
        for rows, out in zip(batches, self.columns(self._pack(batches), temperature), strict=True):
            if rows is not None:
                for name, column in out.items():
                    outputs.setdefault(name, []).append(column)
        lengths = data.ragged("responses").lengths
        empty = torch.empty(0)
        names = ("values",) if self.head is Head.VALUE else ("log_probs", "entropys")
        columns = DataProto.from_dict({n: Ragged(torch.cat(outputs.get(n, [empty])).cpu(), lengths) for n in names})
        return columns if self.model_group is None else columns.select_idxs(list(own))

    @uses_weights
    @torch.no_grad()
    def score(self, rows: Ragged, budget: Budget, pad_token_id: int) -> Tensor:
        """One score for each row of token ids [rows] (score head)."""
        self.module.eval()
        data, own = join_rows(DataProto.from_dict({"rows": rows}), self.model_group)
        rows = data.ragged("rows")
        scores = []
        for index in self._equal_counts(cut_into_micro_batches(rows.lengths.tolist(), budget.times(self.token_ranks))):
            part = rows.select(torch.tensor(index)) if index else placeholder_row().ragged("prompts")
            part_scores = self.scores(part, pad_token_id)
            scores += [part_scores.cpu()] if index else []
        return torch.cat(scores)[list(own)] if scores else torch.empty(0)

    @uses_weights
    def forward_backward(
        self, data: DataProto, loss_fn: LossFn, budget: Budget, temperature: float = 1.0, entropy_grad: bool = False
    ) -> dict[str, Metric]:
        """Add the gradient of `loss_fn` over these rows to the gradients; returns the loss function's metrics, merged.

        Raises NumericalError, after the last pass, when the loss of a micro-batch is not finite.
        """
        self.module.train()
        data, _ = join_rows(data, self.model_group)
        metrics: list[dict[str, Metric | Pending]] = []
        batches = self._micro_batches(data, budget)
        parts = MadeWhenRead(len(batches), lambda number: self._loss_parts(batches[number]))

        def loss_of(number: int, columns: dict[str, Tensor], part: int = 0) -> Tensor:
            if not parts[number]:
                return sum((column.sum() for column in columns.values()), torch.zeros((), device=self.device)) * 0.0
            rows = parts[number][part].to(self.device)
            loss, batch_metrics = loss_fn(_token_outputs(columns, rows.ragged("responses").lengths), rows)
            metrics.append(batch_metrics | {"check/loss": _finite_loss(loss, rows)})
            return loss * self.gradient_ranks

        self.backward(self._pack(batches), loss_of, temperature, entropy_grad)
        found = read(metrics)
        return merge_metrics(found) if self.reports else {}

    # -- what a backend replaces when its ranks take turns (pipelines) or its model is not transformers' -----------------------

    def columns(self, packs: Sequence[PackedRows], temperature: float) -> Iterator[dict[str, Tensor]]:
        """The columns of each micro-batch in turn, on every rank of the model group, without a gradient."""
        for packed in packs:
            yield self._run(packed, temperature)

    def backward(self, packs: Sequence[PackedRows], loss_of: LossOf, temperature: float, entropy_grad: bool) -> None:
        """Forward and backward of each micro-batch; gradients are reduced over the ranks once, at the end."""
        for number, packed in enumerate(packs):
            with self.gradient_sync(number == len(packs) - 1):
                self._loss(number, packed, loss_of, temperature, entropy_grad).backward()

    def scores(self, rows: Ragged, pad_token_id: int) -> Tensor:
        """One score for each row of token ids, on every rank of the model group."""
        return sequence_scores(self.module, *pad_rows(rows, pad_token_id, self.device))

    # -- inside --------------------------------------------------------------------------------------------------------------

    def _pack(self, batches: Sequence[DataProto | None]) -> Sequence[PackedRows]:
        return MadeWhenRead(len(batches), lambda number: pack_rows(batches[number] or placeholder_row(), self.device))

    def _run(self, packed: PackedRows, temperature: float, entropy_grad: bool = False) -> dict[str, Tensor]:
        if self.head is Head.VALUE:
            values = token_values(self.module, packed.input_ids, packed.position_ids, packed.layout, packed.predict_at)
            return {"values": values}
        log_probs, entropy = token_log_probs(
            self.module,
            packed.input_ids,
            packed.position_ids,
            packed.layout,
            packed.predict_at,
            packed.targets,
            temperature,
            entropy_grad,
            self.token_head,
        )
        return {"log_probs": log_probs, "entropys": entropy}

    def _loss(self, number: int, packed: PackedRows, loss_of: LossOf, temperature: float, entropy_grad: bool) -> Tensor:
        counts = self._rows_of_parts(packed.response_lengths)
        if counts is None:
            return loss_of(number, self._run(packed, temperature, entropy_grad))
        assert self.token_head is not None

        def loss_of_part(part: int, log_probs: Tensor, entropy: Tensor) -> Tensor:
            return loss_of(number, {"log_probs": log_probs, "entropys": entropy}, part)

        parts = LossParts([int(lengths.sum()) for lengths in packed.response_lengths.split(counts)], loss_of_part)
        places = (packed.input_ids, packed.position_ids, packed.layout, packed.predict_at, packed.targets)
        return token_loss(self.module, *places, temperature, entropy_grad, self.token_head, parts)

    def _rows_of_parts(self, lengths: Tensor) -> list[int] | None:
        """How many rows each part of a micro-batch has whose loss the output layer takes while it has their logits.

        None where it gives log-probs instead: rows are not whole here, or the logits of one are too many to exist at once.
        """
        if self.token_head is None or self.token_ranks > 1 or int(lengths.max()) > self.token_head.tokens_at_once:
            return None
        return [len(rows) for rows in cut_into_micro_batches(lengths.tolist(), Budget(self.token_head.tokens_at_once))]

    def _loss_parts(self, rows: DataProto | None) -> list[DataProto]:
        if rows is None:
            return []
        counts = self._rows_of_parts(rows.ragged("responses").lengths)
        if counts is None:
            return [rows]
        return [rows.slice(end - count, end) for count, end in zip(counts, itertools.accumulate(counts), strict=True)]

    def _micro_batches(self, data: DataProto, budget: Budget) -> Sequence[DataProto | None]:
        # A row without a response (its request failed) has nothing to compute, and its prompt may be what was wrong.
        rows = (data.ragged("responses").lengths > 0).nonzero().flatten()
        data = data if len(rows) == len(data) else data.select_idxs(rows)
        budget = budget.times(self.token_ranks)
        batches = self._equal_counts(cut_into_micro_batches(data.token_counts().tolist(), budget, shared_prompt_tokens(data)))
        return MadeWhenRead(len(batches), lambda number: data.select_idxs(batches[number]) if batches[number] else None)

    def _equal_counts(self, batches: list[list[int]]) -> list[list[int]]:
        """Add empty micro-batches until every rank has as many: each forward of a sharded model is a collective."""
        count = torch.tensor(len(batches))
        if self.world_size > 1:
            count = count.to(self.device)
            dist.all_reduce(count, dist.ReduceOp.MAX)
        return batches + [[]] * (int(count) - len(batches))


def _finite_loss(loss: Tensor, rows: DataProto) -> Pending:
    """A check that the loss of a micro-batch is finite."""

    def check(numbers: list[float]) -> None:
        if not math.isfinite(numbers[0]):
            indices = list(rows.non_tensor_batch.get("index", range(len(rows))))
            raise NumericalError(
                f"the loss is {numbers[0]} in a micro-batch with dataset rows {indices}; nothing was updated. "
                "Look at these rows' log-probs, advantages and rewards"
            )

    return Pending(loss.detach(), check)


def _token_outputs(columns: dict[str, Tensor], lengths: Tensor) -> TokenOutputs:
    padded = {name: Ragged(column, lengths).pad() for name, column in columns.items()}
    return TokenOutputs(padded.get("log_probs"), padded.get("entropys"), padded.get("values"))
