"""MegatronEngine: a Hugging Face model as megatron-core computes it, divided over tensor, pipeline and data-parallel ranks."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.backends.megatron.convert import Read, place_parameters
from lockstep.backends.megatron.layout import join_layout
from lockstep.backends.megatron.library import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
    get_forward_backward_func,
    quiet,
)
from lockstep.backends.megatron.model import Stage
from lockstep.backends.megatron.optimizer import MASTER, AdamW
from lockstep.backends.megatron.spec import transformer_config
from lockstep.backends.megatron.weights import MegatronWeights
from lockstep.config.engine import MegatronConfig, OptimConfig
from lockstep.models.chunked_head import Read as ReadHidden
from lockstep.models.chunked_head import stacked_log_probs
from lockstep.models.flops import head_size
from lockstep.models.load import Head
from lockstep.models.packing import Budget, PackedRows
from lockstep.models.weight_files import WeightFiles
from lockstep.observability.metrics import Metric
from lockstep.protocol import DataProto
from lockstep.workers.engine.base import LANGUAGE_COLUMNS, LossFn, TrainEngine
from lockstep.workers.engine.checkpoint import Progress
from lockstep.workers.engine.spec import EngineSpec

Consume = Callable[[int, Tensor], Tensor]
"""(number of the micro-batch, the columns side by side) -> its loss. Called on ranks of the last stage."""


class MegatronEngine(TrainEngine):
    """See TrainEngine. The model of transformers says what to build, and its files have the weights."""

    exports_copies = True
    trains_in_training_mode = True  # megatron-core recomputes activations only there; its config has no dropout

    def __init__(self, config: MegatronConfig, spec: EngineSpec) -> None:
        module, source = spec.load()
        head = spec.head
        optim = spec.optim
        device = spec.device
        super().__init__(spec, module, config.dtype)
        if device.type == "cuda":
            torch.cuda.set_device(device)  # megatron-core makes its buffers on the current device
        hf_config = self.folder.hf_config
        shapes = self.folder.shapes
        self._layout = layout = join_layout(config, spec.seed)
        self.model_group = layout.model if layout.model.size() > 1 else None
        self.gradient_ranks = layout.data.size()
        self.reports = layout.is_last_stage and layout.tensor.rank() == 0
        stage = Stage(
            transformer_config(hf_config, config, self.dtype, spec.recompute(module, self.dtype)),
            head,
            layout,
            vocabulary=hf_config.vocab_size,
            tied=head is Head.LANGUAGE_MODEL and "lm_head.weight" not in shapes,
            head_bias="score.bias" in shapes,
            inverse_frequencies=module.base_model.get_buffer("rotary_emb.inv_freq"),
            windows=self.cost.windows,
        ).to(device)
        placed = place_parameters(shapes, hf_config.num_hidden_layers, head_size(hf_config), layout.pipeline.size())
        self._weights = MegatronWeights(stage, placed, shapes, layout, device)
        self._optimizer: AdamW | None = None
        self.module: nn.Module = stage.requires_grad_(False) if optim is None else self._trained(stage, optim, config)
        self._fill(source.read)
        self.decoder = spec.decoder(module)

    def _trained(self, stage: Stage, optim: OptimConfig, config: MegatronConfig) -> DistributedDataParallel:
        with quiet():
            model = DistributedDataParallel(
                stage.config,
                DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=config.use_distributed_optimizer),
                stage,
            )
        self._optimizer = AdamW(model, optim, self.dtype, config.use_distributed_optimizer, self._layout.data)
        return model

    # -- what the model computes -----------------------------------------------------------------------------------------------

    def columns(self, packs: Sequence[PackedRows], temperature: float) -> Iterator[dict[str, Tensor]]:
        """See TrainEngine. The ranks of the last stage have the columns and give them to the others."""
        if self.teacher is not None:
            yield from super().columns(packs, temperature)
            return
        for packed, stacked in zip(packs, self._forward(packs, temperature), strict=True):
            yield self._named(self._from_last_stage(stacked, len(packed.predict_at)))

    def forward_backward(
        self, data: DataProto, loss: LossFn, budget: Budget, temperature: float = 1.0, entropy_grad: bool = False
    ) -> dict[str, Metric]:
        """See TrainEngine. Gradients are reduced over the ranks in `_clip_gradients`."""
        if self.teacher is not None:
            return super().forward_backward(data, loss, budget, temperature, entropy_grad)
        packs, loss_pass = self._begin(data, loss, budget, temperature, entropy_grad)

        def loss_of(number: int, stacked: Tensor) -> Tensor:
            # The schedule divides by the number of micro-batches, but a loss here is a part of a sum and not of a mean.
            packed = packs[number]
            return loss_pass.of(packed).loss_of(self._named(stacked), packed.tokens) * len(packs)

        self._schedule(packs, loss_of, temperature, entropy_grad, forward_only=False)
        return self._metrics(loss_pass)

    def read_hidden(self, packed: PackedRows, read: ReadHidden) -> Any:
        return self.module(packed, read)

    def gradient_sync(self, enabled: bool) -> AbstractContextManager[None]:
        """Nothing to switch: megatron's schedule only adds up, and `_clip_gradients` reduces."""
        return nullcontext()

    def _forward(self, packs: Sequence[PackedRows], temperature: float) -> list[Tensor | None]:
        """The columns of each micro-batch side by side, on ranks of the last stage; None on others."""
        outputs: list[Tensor | None] = [None] * len(packs)

        def keep(number: int, stacked: Tensor) -> Tensor:
            outputs[number] = stacked
            return torch.zeros((), device=self.device)

        self._schedule(packs, keep, temperature, entropy_grad=False, forward_only=True)
        return outputs

    def _schedule(
        self, packs: Sequence[PackedRows], consume: Consume, temperature: float, entropy_grad: bool, *, forward_only: bool
    ) -> None:
        """Run all micro-batches through the stages: one after another, or 1F1B with a pipeline."""
        if not packs:
            return

        def forward_step(numbers: Iterator[int], model: nn.Module) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, None]]]:
            number = next(numbers)
            read = partial(stacked_log_probs, packs[number].targets, temperature, entropy_grad)
            return model(packs[number], read), lambda output: (consume(number, output), None)

        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(range(len(packs))),
            model=[self.module],
            num_microbatches=len(packs),
            seq_length=1,  # stages tell each other the shape of what they send
            micro_batch_size=1,
            forward_only=forward_only,
        )

    def _from_last_stage(self, stacked: Tensor | None, rows: int) -> Tensor:
        if stacked is None:
            stacked = torch.empty(rows, len(LANGUAGE_COLUMNS) if self.head is Head.LANGUAGE_MODEL else 1, device=self.device)
        return self._layout.from_stage(stacked, self._layout.pipeline.size() - 1)

    # -- the optimizer ---------------------------------------------------------------------------------------------------------

    def _clip_gradients(self, max_norm: float) -> float:
        """See TrainEngine. The optimizer clips them in its step."""
        assert self._optimizer is not None, "a frozen engine cannot learn"
        finalize_model_grads([self.module])
        return self._optimizer.gradient_norm()

    def _apply_gradients(self, norm: float, lr: float) -> None:
        assert self._optimizer is not None, "a frozen engine cannot learn"
        self._optimizer.step(norm, lr)

    def _clear_gradients(self) -> None:
        assert self._optimizer is not None, "a frozen engine cannot learn"
        assert isinstance(self.module, DistributedDataParallel)
        self.module.zero_grad_buffer()
        self._optimizer.zero_grad()

    # -- weights and checkpoints -------------------------------------------------------------------------------------------------

    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        """See TrainEngine. Tensors are those of the computation, in its type; `save` writes the float32 master weights."""
        return self._weights.export(lambda parameter: parameter, self.dtype)

    def _saved_weights(self) -> Iterator[tuple[str, Tensor]]:
        return self._export_moments(MASTER)

    def _read_weights(self, path: Path, files: WeightFiles) -> None:
        self._fill(files.read)

    def _read_moments(self, kind: str, read: Read) -> None:
        assert self._optimizer is not None
        self._weights.read_into(read, partial(self._optimizer.write, kind))

    def _set_steps(self, progress: Progress) -> None:
        assert self._optimizer is not None
        self._optimizer.set_steps(progress.updates)

    def _export_moments(self, kind: str) -> Iterator[tuple[str, Tensor]]:
        """Master weights or a moment, in float32; of a frozen engine its weights."""
        optimizer = self._optimizer
        if optimizer is None:
            return self._weights.export(lambda parameter: parameter.float(), torch.float32)
        return self._weights.export(partial(optimizer.read, kind), torch.float32)

    @torch.no_grad()
    def _fill(self, read: Read) -> None:
        def put(parameter: nn.Parameter, value: Tensor) -> None:
            parameter.copy_(value)
            if self._optimizer is not None:
                self._optimizer.write(MASTER, parameter, value)

        self._weights.read_into(read, put)
