"""TrainEngine: one model that computes columns, learns from losses, and gives its weights away. Backends differ in how it is sharded.

The loop over micro-batches is here, once, for every backend. A loss is a sum over denominators that hold for the whole mini-batch
(all ranks, all micro-batches), so how rows are cut never changes it.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cache, partial
from itertools import accumulate
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from lockstep.errors import NumericalError
from lockstep.models.chunked_head import (
    ChunkedLoss,
    LossFn,
    LossOutput,
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
from lockstep.models.weight_files import TensorSpec, WeightFiles, write_weights
from lockstep.observability.metrics import Metric, merge_metrics
from lockstep.protocol import DataProto, Ragged
from lockstep.workers.engine.checkpoint import (
    MOMENTS,
    OPTIMIZER,
    WEIGHTS,
    ModelFolder,
    Place,
    Progress,
    Specs,
    Write,
    open_moments,
    read_progress,
    write_index,
    write_progress,
    write_shares,
)
from lockstep.workers.engine.dtensor import ReadRows
from lockstep.workers.engine.optim import OptimResult, Updates
from lockstep.workers.engine.pending import finite_loss, read
from lockstep.workers.engine.spec import EngineSpec, compute_dtype

__all__ = ["LossFn", "LossOutput", "LossPass", "OptimResult", "TokenOutputs", "TokenRows", "TrainEngine"]


LANGUAGE_COLUMNS = ("log_probs", "entropys", "top_log_probs")
"""What a language model says about each token, in the order of `chunked_log_probs`."""


T = TypeVar("T")


class LazySequence(Sequence[T], Generic[T]):
    """The items `make(0)` to `make(length - 1)`, each made on first use and then kept."""

    def __init__(self, length: int, make: Callable[[int], T]) -> None:
        self._numbers = range(length)
        self._make = cache(make)

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: Any) -> Any:
        number = self._numbers[index]
        return self._make(number) if isinstance(number, int) else [self._make(i) for i in number]


def join_rows(data: DataProto, group: dist.ProcessGroup | None) -> tuple[DataProto, Sequence[int]]:
    """Return the rows of all ranks of `group` (None: this rank's), in the order of the ranks, and the positions of this rank's rows."""
    if group is None:
        return data, range(len(data))
    parts: list[DataProto] = [None] * group.size()  # type: ignore[list-item]
    dist.all_gather_object(parts, data, group=group)
    ends = list(accumulate(len(part) for part in parts))
    rank = group.rank()
    return DataProto.concat([part for part in parts if len(part)] or parts[:1]), range(ends[rank] - len(data), ends[rank])


class Comparison(Protocol):
    """A comparison of a student with another model."""

    def columns(self, student: TrainEngine, packed: PackedRows) -> dict[str, Tensor]:
        """Return the columns of TokenOutputs that compare the two on a micro-batch."""


class TrainEngine(ABC):
    """One model on `world_size` ranks. Every method is called on all ranks together, each with its own rows.

    Ranks that compute one model together (tensor, pipeline or sequence parallel: `model_group`) join their rows, compute all of them, and
    each returns its own: a caller need not know how an engine is laid out.
    """

    rank: int
    world_size: int
    head: Head
    folder: ModelFolder
    """The model as a checkpoint has it."""
    module: torch.nn.Module
    """The model as the backend wraps it."""
    decoder: PreTrainedModel | None = None
    """A plain module of the same model for generation, if the spec asks for one; SharedWeights fills in its parameters."""
    tokens_at_once: int | None = None
    """Tokens whose logits exist at a time, if the model hands out its hidden states (models/chunked_head.py); None if it makes logits."""
    hands_out_hidden: bool = True
    """Whether `read_hidden` can be called: not if the model changes the logits after the output layer."""
    cost: ModelCost
    """The cost of a token, for rates."""
    dtype: torch.dtype
    """The type of the computation."""
    device: torch.device
    model_group: dist.ProcessGroup | None = None
    """The ranks that compute the same rows together; None if each computes its own."""
    gradient_ranks: int
    """The ranks over which the backend averages gradients; a loss is a sum over them."""
    token_ranks: int = 1
    """Number of ranks that divide the tokens of a micro-batch, which may hold as many times the budget."""
    exports_copies: bool = False
    """Whether export_weights makes new tensors even on one rank."""
    constant: frozenset[str] = frozenset()
    """Names in `decoder` of weights that no update changes: the base model of adapters."""
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
        self.head = spec.head
        self.device = spec.device
        self.dtype = compute_dtype(dtype, spec.device)
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.folder = ModelFolder.of(module, specs)
        self.cost = model_cost(module)
        self._updates = Updates(spec.optim, spec.total_updates)

    # -- what a backend provides -------------------------------------------------------------------------------------------

    @abstractmethod
    def _clip_gradients(self, max_norm: float) -> float:
        """Reduce the gradients over the ranks and clip them, here or in `_apply_gradients`. Return their norm before clipping."""

    @abstractmethod
    def _apply_gradients(self, norm: float, lr: float) -> None:
        """Make an optimizer step with the learning rate `lr`; `norm` is what `_clip_gradients` returned."""

    @abstractmethod
    def _clear_gradients(self) -> None: ...

    @abstractmethod
    def gradient_sync(self, enabled: bool) -> AbstractContextManager[None]:
        """Context in which backward passes do (or do not) reduce gradients over the ranks."""

    def decoder_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name in `decoder`, whole tensor) like export_weights, but adapters (LoRA) unmerged."""
        return self.export_weights()

    def adapter_off(self) -> AbstractContextManager[None]:
        """Context in which the model is the one that training started from. Only for an engine that trains adapters (LoRA)."""
        raise AssertionError("this engine trains the model itself, so the one it started from is gone")

    def release(self) -> None:
        """Free the weights that forward passes without a backward pass have gathered, if any."""
        return

    @abstractmethod
    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (Hugging Face name, whole tensor) of every parameter and saved buffer; a tied weight comes once.

        On one rank the tensors are the parameters themselves, not copies: they follow later updates (unless `exports_copies`).
        """

    @abstractmethod
    def _read_weights(self, path: Path, files: WeightFiles) -> None:
        """Read the weights of the checkpoint in the folder `path`; their shapes are checked."""

    @abstractmethod
    def _export_moments(self, kind: str) -> Iterator[tuple[str, Tensor]]:
        """Yield (Hugging Face name, whole tensor) of one of AdamW's moments for every trained weight; zeros before the first update.

        Changes nothing: an optimizer without state keeps none.
        """

    @abstractmethod
    def _read_moments(self, kind: str, read: ReadRows) -> None:
        """Replace one of AdamW's moments."""

    @abstractmethod
    def _set_steps(self, progress: Progress) -> None:
        """Replace AdamW's count of updates; called after `_read_moments`."""

    def _steps(self) -> dict[str, int]:
        """Return name -> AdamW's count of updates, for the weights of this rank."""
        return dict.fromkeys(self.moment_specs, self._updates.done)

    def on_device(self) -> AbstractContextManager[None]:
        """Context in which the weights are on the device.

        Every method enters it. A caller of several methods enters it around them, so that an offloaded engine is moved once.
        """
        return nullcontext()

    def _check(self, path: Path) -> None:  # noqa: B027  (most have nothing to add)
        """Raise DataError if this engine cannot resume the checkpoint for another reason than the shapes of its weights."""

    @property
    def moment_specs(self) -> Specs:
        """Hugging Face name -> type and shape of each moment of the trained weights."""
        return self.folder.specs

    def _saved_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights as a checkpoint has them."""
        return self.export_weights()

    # -- what every backend shares -----------------------------------------------------------------------------------------

    @torch.no_grad()
    def forward(self, data: DataProto, budget: Budget, temperature: float = 1.0) -> DataProto:
        """Return the model's columns for these rows, in order: log_probs and entropys, or values."""
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
        """Return the loss's metrics over these rows, merged, without a gradient."""
        self.module.eval()
        data, _ = join_rows(data, self.model_group)
        packs = self._packs(data, budget)
        loss_pass = LossPass(loss, temperature=1.0, entropy_grad=False)
        with self.on_device():
            for packed, out in zip(packs, self.columns(packs, 1.0), strict=True):
                loss_pass.of(packed).loss_of(out, packed.tokens)
        return self._metrics(loss_pass)

    def forward_backward(
        self, data: DataProto, loss: LossFn, budget: Budget, temperature: float = 1.0, entropy_grad: bool = False
    ) -> dict[str, Metric]:
        """Add the gradient of `loss` over these rows to the gradients; the last micro-batch reduces them over the ranks.

        Return the loss's metrics, merged. Raise NumericalError, after the last pass, if the loss of a chunk is not finite.
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

    def optim_step(self) -> OptimResult:
        """Clip, step, clear the gradients. Return their norm and the learning rate.

        Raise NumericalError, before any weight changes, if the gradient is not finite.
        """
        updates = self._updates
        with self.on_device():
            norm = self._clip_gradients(updates.max_norm)
            if not math.isfinite(norm):
                self._clear_gradients()
                raise NumericalError(f"the gradient norm is {norm} at update {updates.done}; no weight was changed")
            lr = updates.next_learning_rate
            self._apply_gradients(norm, lr)
            self._clear_gradients()
        updates.done += 1
        return OptimResult(grad_norm=norm, lr=lr)

    def save(self, path: Path, write: Write = write_weights) -> None:
        """Write a Hugging Face folder (weights, config) and, for a trained model, the state of its optimizer.

        Each rank writes a share with `write`; the folder is whole when all have written. The engine does not change.
        """
        place = Place(self.rank, self.world_size)
        files = {path / WEIGHTS: self.folder.specs}
        folder = path / OPTIMIZER if self._is_trained else path
        folder.mkdir(parents=True, exist_ok=True)
        write_shares(path / WEIGHTS, self.folder.specs, self._saved_weights(), place, write)
        found: list[dict[str, int]] = [{}] * self.world_size
        if self._is_trained:
            for kind in MOMENTS:
                file = path / OPTIMIZER / f"{kind}.safetensors"
                files[file] = self.moment_specs
                write_shares(file, self.moment_specs, self._export_moments(kind), place, write)
            dist.all_gather_object(found, self._steps())
        try:  # what can fail on one rank alone comes after all that the ranks do together
            if self.rank == 0:
                self.folder.write_config(path)
                for file, specs in files.items():
                    write_index(file, specs, self.world_size)
                if self._is_trained:
                    steps = {name: max(part.get(name, 0) for part in found) for name in self.moment_specs}
                    write_progress(path, Progress(self._updates.done, steps))
        finally:
            dist.barrier()  # every rank returns with all files written

    @property
    def _is_trained(self) -> bool:
        return self._updates.config is not None

    def load(self, path: Path) -> None:
        """Read a folder that `save` wrote at any number of ranks. Raise DataError, before anything changes, if it does not fit."""
        weights = self.folder.open(path)
        self._check(path)
        moments = {}
        progress = None
        if self._is_trained:
            moments = {kind: open_moments(path, kind, self.moment_specs) for kind in MOMENTS}
            progress = read_progress(path, self.moment_specs)
        with self.on_device():
            self._read_weights(path, weights)
            for kind, files in moments.items():
                self._read_moments(kind, files.read)
            if progress is not None:
                self._set_steps(progress)
                self._updates.done = progress.updates

    # -- what a backend replaces when its ranks take turns (pipelines) or its model is not transformers' -----------------------

    def columns(self, packs: Sequence[PackedRows], temperature: float) -> Iterator[dict[str, Tensor]]:
        """Yield the columns of each micro-batch, on every rank of the model group, without a gradient."""
        for packed in packs:
            yield self._run(packed, temperature)

    def read_hidden(self, packed: PackedRows, read: Read) -> Any:
        """Call `read` inside a forward pass of one micro-batch, with the output layer and the hidden states where tokens are predicted.

        Return what `read` returns. Not in a pipeline.
        """
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
        """Return the merged metrics of the pass, read from the device at once. Raise what its checks raise."""
        outputs = []
        for output, tokens in loss_pass.found:
            checks = [*output.checks, finite_loss(output.loss, tokens.indices)]
            outputs.append(replace(output, checks=checks))
        found = read(outputs)
        return merge_metrics(found) if self.reports else {}

    def _packs(self, data: DataProto, budget: Budget) -> Sequence[PackedRows]:
        """Return the rows in micro-batches; each is cut and packed when it is read, while the device works on the one before."""
        # A row without a response (its request failed) has nothing to compute, and its prompt may be what was wrong.
        rows = (data.ragged("responses").lengths > 0).nonzero().flatten()
        data = data if len(rows) == len(data) else data.select_idxs(rows)
        counts = data.token_counts().tolist()
        budget = budget.times(self.token_ranks)
        scored = self.head is Head.SCORE
        batches = self.equal_counts(cut_into_micro_batches(counts, budget, shared_prompt_tokens(data), data.units()))
        return LazySequence(len(batches), lambda number: pack_rows(data.select_idxs(batches[number]), self.device, scored))

    def equal_counts(self, batches: list[list[int]]) -> list[list[int]]:
        """Add empty micro-batches until every rank has equally many, at least one.

        Each forward of a sharded model is a collective, and an update needs gradients, even if they are 0.
        """
        count = torch.tensor(max(len(batches), 1))
        if self.world_size > 1:
            count = count.to(self.device)
            dist.all_reduce(count, dist.ReduceOp.MAX)
        return batches + [[]] * (int(count) - len(batches))


def logits_at_once(vocabulary: int, device: torch.device) -> int:
    """Return the number of tokens whose logits over `vocabulary` may exist at a time."""
    return max(1, most_logits(device) // vocabulary)
