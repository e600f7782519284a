"""TorchtitanEngine: a Hugging Face model as torchtitan computes it, on a grid of pipeline x data x tensor parallel ranks, with AdamW."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lockstep.backends.torchtitan.model import Question, decoder_config
from lockstep.backends.torchtitan.names import hf_name
from lockstep.backends.torchtitan.parallel import build, compile_layers, make_layout, whole_tensors
from lockstep.backends.torchtitan.pipeline import Inputs, Pipeline
from lockstep.config.engine import TorchtitanConfig
from lockstep.models.chunked_head import Read, stacked_log_probs
from lockstep.models.load import Head
from lockstep.models.packing import Budget, PackedRows
from lockstep.models.weight_files import WeightFiles
from lockstep.observability.metrics import Metric
from lockstep.protocol import DataProto
from lockstep.workers.engine.base import LANGUAGE_COLUMNS, LossFn, TrainEngine
from lockstep.workers.engine.checkpoint import Progress
from lockstep.workers.engine.dtensor import ReadRows, clip_grad_norm, read_shards
from lockstep.workers.engine.optim import make_adamw, moment_of, read_sharded_moments, set_steps, step_adamw, steps_of
from lockstep.workers.engine.spec import EngineSpec

_EMBEDDING = "model.embed_tokens.weight"


class TorchtitanEngine(TrainEngine):
    """See TrainEngine. The model of transformers says what to build, and its files have the weights."""

    gradient_ranks = 1  # torchtitan sums gradients

    def __init__(self, config: TorchtitanConfig, spec: EngineSpec) -> None:
        model, source = spec.load()
        head = spec.head
        optim = spec.optim
        device = spec.device
        super().__init__(spec, model, config.dtype)
        self._layout = make_layout(config.tensor_parallel_size, config.pipeline_parallel_size)
        self.model_group = self._layout.model_group
        self.reports = self._layout.reports
        tied = head is Head.LANGUAGE_MODEL and bool(model.config.tie_word_embeddings)
        # In a pipeline the first and the last stage have a copy each of a tied embedding; see _sum_tied.
        self._has_copies = tied and self._layout.stages is not None
        titan = decoder_config(model, tied and not self._has_copies)
        recompute = spec.recompute(model, self.dtype)
        self.module = build(titan, self._layout, self.dtype, recompute, optim is not None, device)
        if config.use_torch_compile:
            compile_layers(self.module)
        output = "model.embed_tokens" if tied else "lm_head" if head is Head.LANGUAGE_MODEL else "score"
        self._parameters = {hf_name(name, output): parameter for name, parameter in self.module.named_parameters()}
        self._owners = self._find_owners()
        read_shards(self._parameters.items(), source.read)
        self._pipeline = Pipeline(self.module, self._layout.stages, titan.dim, self.dtype, device, self._layout.tensor_mesh)
        self._optimizer = make_adamw(self._parameters.values(), optim) if optim else None
        self.decoder = spec.decoder(model)

    def _find_owners(self) -> dict[str, int]:
        """For each parameter the stage that has it; of two copies the first."""
        if self._layout.stages is None:
            return dict.fromkeys(self._parameters, 0)
        names: list[list[str]] = [[]] * self._layout.dims.pp
        dist.all_gather_object(names, list(self._parameters), group=self._layout.stages)
        return {name: stage for stage in reversed(range(len(names))) for name in names[stage]}

    # -- passes ----------------------------------------------------------------------------------------------------------------

    def columns(self, packs: Sequence[PackedRows], temperature: float) -> Iterator[dict[str, Tensor]]:
        if self.teacher is not None:
            yield from super().columns(packs, temperature)
            return
        for answer in self._answers([self._inputs(packed, temperature) for packed in packs]):
            yield self._named(answer)

    def forward_backward(
        self, data: DataProto, loss: LossFn, budget: Budget, temperature: float = 1.0, entropy_grad: bool = False
    ) -> dict[str, Metric]:
        if self.teacher is not None:
            return super().forward_backward(data, loss, budget, temperature, entropy_grad)
        packs, loss_pass = self._begin(data, loss, budget, temperature, entropy_grad)
        batches = [self._inputs(packed, temperature, entropy_grad) for packed in packs]

        def loss_of(number: int, answer: Tensor) -> Tensor:
            packed = packs[number]
            return loss_pass.of(packed).loss_of(self._named(answer), packed.tokens)

        self._pipeline.backward(batches, loss_of, self.gradient_sync)
        return self._metrics(loss_pass)

    def _answers(self, batches: Sequence[Inputs]) -> Iterator[Tensor]:
        """What the output layer says of each micro-batch, on every rank, without a gradient."""
        answers = self._pipeline.forward(batches)
        for number, (*_, question) in enumerate(batches):
            shape = (len(question.at), len(LANGUAGE_COLUMNS)) if self.head is Head.LANGUAGE_MODEL else (len(question.at),)
            answer = answers[number] if answers else torch.empty(shape, device=self.device)
            if self._layout.stages is not None:
                dist.broadcast(answer, group=self._layout.stages, group_src=self._layout.dims.pp - 1)
            yield answer

    def _inputs(self, packed: PackedRows, temperature: float, entropy_grad: bool = False) -> Inputs:
        question = Question(packed.predict_at, partial(stacked_log_probs, packed.targets, temperature, entropy_grad))
        return packed.input_ids, packed.position_ids, packed.layout, question

    def read_hidden(self, packed: PackedRows, read: Read) -> Any:
        return self.module(packed.input_ids, packed.position_ids, packed.layout, Question(packed.predict_at, read))

    # -- updates ---------------------------------------------------------------------------------------------------------------

    @contextmanager
    def gradient_sync(self, enabled: bool) -> Iterator[None]:
        assert isinstance(self.module, FSDPModule)
        self.module.set_requires_gradient_sync(enabled)
        if self._layout.stages is not None:  # further micro-batches may be between forward and backward
            self.module.set_is_last_backward(enabled)
        yield

    def _clip_gradients(self, max_norm: float) -> float:
        if self._has_copies:
            self._sum_tied()
        gradients = {name: p.grad for name, p in self._parameters.items() if p.grad is not None}
        counted = [gradient for name, gradient in gradients.items() if self._owners[name] == self._layout.stage]
        return clip_grad_norm(gradients.values(), max_norm, counted, self._layout.stages)

    def _apply_gradients(self, norm: float, lr: float) -> None:
        assert self._optimizer is not None, "a frozen engine cannot learn"
        step_adamw(self._optimizer, lr)

    def _clear_gradients(self) -> None:
        assert self._optimizer is not None, "a frozen engine cannot learn"
        self._optimizer.zero_grad()

    def _sum_tied(self) -> None:
        """Give both copies of a tied embedding the gradient of both: they start alike, so they stay alike."""
        if self._layout.ends is not None and (self._layout.is_first or self._layout.is_last):
            gradient = self._parameters[_EMBEDDING].grad
            assert isinstance(gradient, DTensor)
            dist.all_reduce(gradient.to_local(), group=self._layout.ends)

    # -- weights ---------------------------------------------------------------------------------------------------------------

    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        return whole_tensors(self._parameters, self.folder.shapes, self._owners, self._layout)

    def _read_weights(self, path: Path, files: WeightFiles) -> None:
        read_shards(self._parameters.items(), files.read)

    def _export_moments(self, kind: str) -> Iterator[tuple[str, Tensor]]:
        assert self._optimizer is not None
        parts = {name: moment_of(self._optimizer, parameter, kind) for name, parameter in self._parameters.items()}
        return whole_tensors(parts, self.folder.shapes, self._owners, self._layout)

    def _read_moments(self, kind: str, read: ReadRows) -> None:
        assert self._optimizer is not None
        read_sharded_moments(self._optimizer, self._parameters, kind, read)

    def _steps(self) -> dict[str, int]:
        assert self._optimizer is not None
        return steps_of(self._optimizer, self._parameters)

    def _set_steps(self, progress: Progress) -> None:
        assert self._optimizer is not None
        set_steps(self._optimizer, self._parameters, progress.steps)
