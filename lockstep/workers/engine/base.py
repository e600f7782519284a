"""TrainEngine: one model that computes columns, learns from losses, and gives its weights away. Backends differ in how it is sharded.

The loop over micro-batches is here, once, for every backend. A loss is a sum over denominators that hold for the whole mini-batch
(all ranks, all micro-batches), so how rows are cut never changes it.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from lockstep.errors import NumericalError
from lockstep.models.chunked_head import (
    ChunkedLoss,
    LossFn,
    LossPass,
    Read,
    TokenOutputs,
    chunked_log_probs,
    logits_log_probs,
    most_logits,
)
from lockstep.models.flops import ModelCost, model_cost
from lockstep.models.load import Head
from lockstep.models.packing import (
    Budget,
    PackedRows,
    TokenRows,
    cut_into_micro_batches,
    pack_rows,
    shared_prompt_tokens,
)
from lockstep.models.weight_files import TensorSpec
from lockstep.observability.metrics import Metric, merge_metrics
from lockstep.protocol import DataProto, Ragged
from lockstep.workers.engine.checkpoint import ModelFolder
from lockstep.workers.engine.micro_batches import LazySequence, join_rows
from lockstep.workers.engine.optim import OptimResult, Updates
from lockstep.workers.engine.pending import Pending, read
from lockstep.workers.engine.precision import compute_dtype
from lockstep.workers.engine.saved import SavedEngine
from lockstep.workers.engine.spec import EngineSpec

__all__ = ["LossFn", "LossPass", "OptimResult", "TokenOutputs", "TokenRows", "TrainEngine"]


LANGUAGE_COLUMNS = ("log_probs", "entropys", "top_log_probs")
"""What a language model says about each token, in the order of `chunked_log_probs`."""


class Comparison(Protocol):
    """A comparison of a student with another model."""

    def columns(self, student: TrainEngine, packed: PackedRows) -> dict[str, Tensor]:
        """Return the columns of TokenOutputs that compare the two on a micro-batch."""


class TrainEngine(SavedEngine):
    """One model on `world_size` ranks. Every method is called on all ranks together, each with rows of its own.

    Where several ranks compute one model together (tensor, pipeline or sequence parallel: `model_group`) they put their rows together,
    all compute all of them, and each returns those it was given: who calls an engine need not know how it is laid out.
    """

    head: Head
    module: torch.nn.Module
    """The model as the backend wraps it."""
    decoder: PreTrainedModel | None = None
    """A plain module of the same model for generation, where one was asked for; SharedWeights fills in its parameters."""
    tokens_at_once: int | None = None
    """Tokens whose logits exist at a time, if the model hands out its hidden states (models/chunked_head.py); None if it makes logits."""
    hands_out_hidden: bool = True
    """Whether `read_hidden` can be called. It cannot where the model does something to the logits after the output layer."""
    cost: ModelCost
    """What a token costs, for rates."""
    dtype: torch.dtype
    """The type of the computation."""
    device: torch.device
    model_group: dist.ProcessGroup | None = None
    """The ranks that compute the same rows together; None where each computes its own."""
    gradient_ranks: int
    """The ranks over which the backend averages gradients; a loss is a sum over them."""
    token_ranks: int = 1
    """How many ranks divide the tokens of a micro-batch among them. It may hold that many times the budget."""
    exports_copies: bool = False
    """Whether export_weights makes new tensors even on one rank."""
    constant: frozenset[str] = frozenset()
    """Names in `decoder` of weights that no update changes: what adapters lie beside."""
    teacher: Comparison | None = None
    """Computes the columns of a student, which compare it with its teacher (workers/distill.py)."""
    trains_in_training_mode: bool = False
    """Whether backward passes set the module to training mode. Models of transformers train in evaluation mode (models/load.py)."""
    reports: bool = True
    """Whether this rank reports the metrics of the rows: one rank of each model group does."""

    def __init__(
        self, spec: EngineSpec, module: PreTrainedModel, dtype: str, specs: Mapping[str, TensorSpec] | None = None
    ) -> None:
        """`module` is the model as transformers builds it; `specs` are for ModelFolder."""
        self.head, self.device, self.dtype = spec.head, spec.device, compute_dtype(dtype, spec.device)
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.folder, self.cost = ModelFolder.of(module, specs), model_cost(module)
        self._updates = Updates(spec.optim, spec.total_updates)

    # -- what a backend provides -------------------------------------------------------------------------------------------

    @abstractmethod
    def optim_step(self) -> OptimResult:
        """Clip, step, clear the gradients. Raises NumericalError, before any weight changes, when the gradient is not finite."""

    @abstractmethod
    def gradient_sync(self, enabled: bool) -> AbstractContextManager[None]:
        """Context in which backward passes do (or do not) reduce gradients over the ranks."""

    def decoder_weights(self) -> Iterator[tuple[str, Tensor]]:
        """(name in `decoder`, whole tensor), otherwise as export_weights; adapters (LoRA) come as they train."""
        return self.export_weights()

    def adapter_off(self) -> AbstractContextManager[None]:
        """Context in which the model is the one that training started from. For an engine that trains adapters beside it (LoRA)."""
        raise AssertionError("this engine trains the model itself, so the one it started from is gone")

    def release(self) -> None:
        """Free what forward passes without a backward pass have gathered of the weights, where a backend gathers any."""

    # -- what every backend shares -----------------------------------------------------------------------------------------

    @torch.no_grad()
    def forward(self, data: DataProto, budget: Budget, temperature: float = 1.0) -> DataProto:
        """The model's columns for these rows: log_probs and entropys, or values. Rows keep their order."""
        self.module.eval()
        data, own = join_rows(data, self.model_group)
        outputs: dict[str, list[Tensor]] = {}
        packs = self._packs(data, budget)
        with self.on_device():
            for packed, out in zip(packs, self.columns(packs, temperature), strict=True):
                if not packed.is_placeholder:
                    for name, column in out.items():
                        outputs.setdefault(name, []).append(column)
        lengths = data.ragged("responses").lengths
        empty = torch.empty(0)
        names = ("values",) if self.head is Head.VALUE else LANGUAGE_COLUMNS[:2]
        columns = DataProto.from_dict({n: Ragged(torch.cat(outputs.get(n, [empty])).cpu(), lengths) for n in names})
        return columns if self.model_group is None else columns.select_idxs(list(own))

    @torch.no_grad()
    def evaluate(self, data: DataProto, loss: LossFn, budget: Budget) -> dict[str, Metric]:
        """The loss's metrics over these rows, merged, without a gradient."""
        self.module.eval()
        data, _ = join_rows(data, self.model_group)
        packs, loss_pass = self._packs(data, budget), LossPass(loss, temperature=1.0, entropy_grad=False)
        with self.on_device():
            for packed, out in zip(packs, self.columns(packs, 1.0), strict=True):
                loss_pass.of(packed).loss_of(out, packed.tokens)
        return self._metrics(loss_pass)

    def forward_backward(
        self, data: DataProto, loss: LossFn, budget: Budget, temperature: float = 1.0, entropy_grad: bool = False
    ) -> dict[str, Metric]:
        """Add the gradient of `loss` over these rows to the gradients, reduced over the ranks with the last micro-batch; returns the
        loss's metrics, merged.

        Raises NumericalError, after the last pass, when the loss of a chunk is not finite.
        """
        packs, loss_pass = self._begin(data, loss, budget, temperature, entropy_grad)
        with self.on_device():
            for number, packed in enumerate(packs):
                at_once = self.tokens_at_once if self.token_ranks == 1 and self.teacher is None else None
                chunks = packed.tokens.chunks(at_once, loss_pass.by_token) if at_once else None
                with self.gradient_sync(number == len(packs) - 1):
                    if chunks is not None:
                        read_loss = partial(ChunkedLoss.apply, loss_pass.of(packed), chunks, packed.targets)
                        value = self.module(**packed.inputs, read=read_loss, read_at=packed.predict_at)
                    else:  # a row that the loss looks at as a whole has too many logits, is divided among ranks, or has a teacher
                        value = loss_pass.of(packed).loss_of(self._run(packed, temperature, entropy_grad), packed.tokens)
                    value.backward()
        return self._metrics(loss_pass)

    # -- what a backend replaces when its ranks take turns (pipelines) or its model is not transformers' -----------------------

    def columns(self, packs: Sequence[PackedRows], temperature: float) -> Iterator[dict[str, Tensor]]:
        """The columns of each micro-batch in turn, on every rank of the model group, without a gradient."""
        for packed in packs:
            yield self._run(packed, temperature)

    def read_hidden(self, packed: PackedRows, read: Read) -> Any:
        """What `read` returns inside a forward pass of one micro-batch, for its hidden states where tokens are predicted and the output
        layer. Not in a pipeline."""
        return self.module(**packed.inputs, read=read, read_at=packed.predict_at)

    # -- inside --------------------------------------------------------------------------------------------------------------

    def _run(self, packed: PackedRows, temperature: float, entropy_grad: bool = False) -> dict[str, Tensor]:
        """The columns [M] of one micro-batch, or its scores [rows]."""
        if self.teacher is not None:
            return self.teacher.columns(self, packed)
        if self.head is Head.SCORE:
            return {"scores": self.module(**packed.inputs, read_at=packed.predict_at)}
        if self.head is Head.VALUE:
            return {"values": self.module(**packed.inputs).logits[0, packed.predict_at, 0].float()}
        if self.tokens_at_once is not None:
            read_columns = partial(chunked_log_probs, packed.targets, temperature, entropy_grad)
            found = self.read_hidden(packed, read_columns)
        else:
            logits = self.module(**packed.inputs, logits_to_keep=packed.predict_at).logits[0]
            found = logits_log_probs(logits, packed.targets, temperature, entropy_grad)
        return dict(zip(LANGUAGE_COLUMNS, found, strict=True))

    def _named(self, stacked: Tensor) -> dict[str, Tensor]:
        """The columns [M] of one micro-batch from what an output layer gives: [M, 3], or [M] or [M, 1] values or scores."""
        if self.head is not Head.LANGUAGE_MODEL:
            return {"values" if self.head is Head.VALUE else "scores": stacked.flatten()}
        return dict(zip(LANGUAGE_COLUMNS, stacked.unbind(-1), strict=True))

    def _begin(
        self, data: DataProto, loss: LossFn, budget: Budget, temperature: float, entropy_grad: bool
    ) -> tuple[Sequence[PackedRows], LossPass]:
        """The micro-batches of a backward pass, and what is asked of each."""
        if self.module.training != self.trains_in_training_mode:  # setting the mode visits every module
            self.module.train(self.trains_in_training_mode)
        data, _ = join_rows(data, self.model_group)
        return self._packs(data, budget), LossPass(loss, temperature, entropy_grad, self.gradient_ranks)

    def _metrics(self, loss_pass: LossPass) -> dict[str, Metric]:
        """What the pass found, read from the device at once."""
        found = read([{**metrics, "check/loss": _finite_loss(loss, tokens)} for loss, metrics, tokens in loss_pass.found])
        return merge_metrics(found) if self.reports else {}

    def _packs(self, data: DataProto, budget: Budget) -> Sequence[PackedRows]:
        """The rows in micro-batches, each cut and packed when it is read: while the device works on the one before."""
        # A row without a response (its request failed) has nothing to compute, and its prompt may be what was wrong.
        rows = (data.ragged("responses").lengths > 0).nonzero().flatten()
        data = data if len(rows) == len(data) else data.select_idxs(rows)
        counts, budget, scored = data.token_counts().tolist(), budget.times(self.token_ranks), self.head is Head.SCORE
        batches = self.equal_counts(cut_into_micro_batches(counts, budget, shared_prompt_tokens(data), data.units()))
        return LazySequence(len(batches), lambda number: pack_rows(data.select_idxs(batches[number]), self.device, scored))

    def equal_counts(self, batches: list[list[int]]) -> list[list[int]]:
        """Add empty micro-batches until every rank has as many, and one at least: each forward of a sharded model is a collective, and an
        update needs gradients, if only of 0."""
        count = torch.tensor(max(len(batches), 1))
        if self.world_size > 1:
            count = count.to(self.device)
            dist.all_reduce(count, dist.ReduceOp.MAX)
        return batches + [[]] * (int(count) - len(batches))


def logits_at_once(vocabulary: int, device: torch.device) -> int:
    """Tokens whose logits over `vocabulary` may exist at a time."""
    return max(1, most_logits(device) // vocabulary)


def _finite_loss(loss: Tensor, tokens: TokenRows) -> Pending:
    """A check that the loss of a chunk is finite."""

    def check(numbers: list[float]) -> None:
        if not math.isfinite(numbers[0]):
            raise NumericalError(
                f"the loss is {numbers[0]} in a micro-batch with dataset rows {list(tokens.indices)}; nothing was updated. "
                "Look at these rows' log-probs, advantages and rewards"
            )

    return Pending(loss, check)
