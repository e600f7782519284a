"""FSDPEngine: a Hugging Face module sharded by FSDP or FSDP2, with AdamW."""

import functools
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lockstep.config.engine import FSDPConfig
from lockstep.errors import DataError
from lockstep.models.chunked_head import hand_out_hidden, logits_are_the_layers
from lockstep.models.load import Head
from lockstep.models.lora import ADAPTER, AdaptedSource, Lora, base_name, is_adapter, unmerged
from lockstep.models.packing import PackedRows
from lockstep.models.weight_files import WeightFiles, WeightSource, write_weights
from lockstep.workers.engine.base import TrainEngine, logits_at_once
from lockstep.workers.engine.checkpoint import Progress, Specs, Write
from lockstep.workers.engine.dtensor import ReadRows
from lockstep.workers.engine.fsdp import sharding
from lockstep.workers.engine.fsdp.checkpoint import (
    export_moments,
    learning_parameters,
    load_adapter,
    load_moments,
    open_adapter,
    save_adapter,
)
from lockstep.workers.engine.offload import Offload, move_state
from lockstep.workers.engine.optim import make_adamw, set_steps, step_adamw, steps_of
from lockstep.workers.engine.sequence import compute_divided, sequence_group
from lockstep.workers.engine.spec import EngineSpec


class FSDPEngine(TrainEngine):
    """See TrainEngine. `version` 1 is FullyShardedDataParallel, 2 is fully_shard; one rank shards nothing.

    `source` fills a `module` on the meta device. `lora` are the adapters in it, which are all that learns then. With
    `config.ulysses_sequence_parallel_size` the ranks of a group have a part of the tokens of a micro-batch each.
    """

    _lora: Lora | None
    _optimizer: torch.optim.AdamW | None
    _moment_specs: Specs
    _offload: Offload | None
    """Moves the weights to the host and back; None where they stay on the device."""
    _offloads_state: bool
    """Whether AdamW's moments are in host memory between updates."""

    def __init__(
        self,
        module: PreTrainedModel,
        spec: EngineSpec,
        *,
        version: int,
        config: FSDPConfig,
        source: WeightSource | None = None,
        lora: Lora | None = None,
    ) -> None:
        head = spec.head
        optim = spec.optim
        device = spec.device
        specs = {
            base_name(name): (tensor.dtype, tuple(tensor.shape))
            for name, tensor in (*module.named_parameters(), *sharding.saved_buffers(module))
            if not is_adapter(name)
        }
        super().__init__(spec, module, config.dtype, specs)
        self._moment_specs = {
            name: (parameter.dtype, tuple(parameter.shape))
            for name, parameter in module.named_parameters()
            if parameter.requires_grad
        }
        self._version = version
        meshes = sharding.make_meshes(config, device)
        self.gradient_ranks = meshes.data.size()
        self.token_ranks = config.ulysses_sequence_parallel_size
        self._sequence = self.model_group = sequence_group(self.token_ranks, device)
        if meshes.tensor is not None:
            self.model_group = meshes.tensor.get_group()
        self.reports = self.model_group is None or self.model_group.rank() == 0
        if optim is None:
            module.requires_grad_(False)
        self._lora = lora
        self.exports_copies = config.param_offload is True
        if lora is not None:
            lora.round_base(module, self.dtype)
            self.constant = frozenset(base_name(name) for name, _ in module.named_parameters()) - set(lora.trained)
            for name, value in lora.values.items() if source is None else ():
                module.get_parameter(name).data.copy_(value)
            source = AdaptedSource(source, lora.values) if source is not None else None
        hands_out = head is Head.LANGUAGE_MODEL and hand_out_hidden(module)
        self.module = self._shard(module, config, meshes, source)
        output = module.get_output_embeddings()
        if hands_out and logits_are_the_layers(self.module, output, device):
            self.tokens_at_once = logits_at_once(output.out_features, device)
        self.hands_out_hidden = self.tokens_at_once is not None
        sharding.reshard(self.module)  # AdamW has to get the shards
        self._keep_gathered = self.world_size == 1 or not config.reshard_after_forward
        self._offloads_state = config.optimizer_offload is True  # auto is for a plan to decide; without one it is no
        trained = (parameter for parameter in self.module.parameters() if parameter.requires_grad)
        self._optimizer = make_adamw(trained, optim) if optim else None
        self._offload: Offload | None = None
        if config.param_offload is True:
            self._offload = Offload(lambda: sharding.shards(self.module), lambda: sharding.gradient_shards(self.module))
            self._offload.to_host()

    def on_device(self) -> AbstractContextManager[None]:
        return self._offload.in_use() if self._offload is not None else nullcontext()

    def _shard(
        self, module: PreTrainedModel, config: FSDPConfig, meshes: sharding.Meshes, source: WeightSource | None
    ) -> nn.Module:
        return sharding.shard(module, self._version, self.dtype, config, meshes, self.device, source)

    def columns(self, packs: Sequence[PackedRows], temperature: float) -> Iterator[dict[str, Tensor]]:
        yield from super().columns(packs, temperature)
        self.release()

    def release(self) -> None:
        sharding.reshard(self.module)

    def _run(self, packed: PackedRows, temperature: float, entropy_grad: bool = False) -> dict[str, Tensor]:
        """By this rank, or by those that divide the tokens."""
        compute = functools.partial(super()._run, temperature=temperature, entropy_grad=entropy_grad)
        return compute(packed) if self._sequence is None else compute_divided(packed, self._sequence, compute)

    def gradient_sync(self, enabled: bool) -> AbstractContextManager[None]:
        return sharding.gradient_sync(self.module, enabled, self._keep_gathered)

    def _clip_gradients(self, max_norm: float) -> float:
        return sharding.clip_grad_norm(self.module, max_norm)

    def _apply_gradients(self, norm: float, lr: float) -> None:
        assert self._optimizer is not None, "a frozen engine cannot learn"
        if self._offload is not None:
            self._offload.changed = True
        if self._offloads_state:
            move_state(self._optimizer, self.device)
        step_adamw(self._optimizer, lr)
        if self._offloads_state:
            move_state(self._optimizer, torch.device("cpu"))

    def _clear_gradients(self) -> None:
        assert self._optimizer is not None, "a frozen engine cannot learn"
        self._optimizer.zero_grad()

    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        return self._exported() if self._lora is None else self._lora.merged(self._exported())

    def decoder_weights(self) -> Iterator[tuple[str, Tensor]]:
        return self._exported() if self._lora is None else unmerged(self._exported())

    def _exported(self) -> Iterator[tuple[str, Tensor]]:
        with self.on_device():
            for name, tensor in sharding.whole_tensors(self.module):
                # The memory of an offloaded weight is gone by the time it is used.
                yield name, tensor if self._offload is None else tensor.clone()

    def adapter_off(self) -> AbstractContextManager[None]:
        return self._lora.off() if self._lora is not None else super().adapter_off()

    # -- checkpoints ----------------------------------------------------------------------------------------------------------

    def save(self, path: Path, write: Write = write_weights) -> None:
        with self.on_device():
            super().save(path, write)
            if self._lora is not None:
                save_adapter(self.module, self._lora, path / ADAPTER, writes=self.rank == 0)

    @property
    def moment_specs(self) -> Specs:
        return self._moment_specs

    def _check(self, path: Path) -> None:
        if self._lora is not None:
            open_adapter(self._lora, path)
        elif self._optimizer is not None and (path / ADAPTER).is_dir():
            raise DataError(f"{path} was trained with adapters ({ADAPTER}); resume it with the model.lora_rank it had")

    def _read_weights(self, path: Path, files: WeightFiles) -> None:
        if self._offload is not None:
            self._offload.changed = True
        if self._lora is not None:
            load_adapter(self.module, self._lora, path, files)
        else:
            sharding.fill(self.module, files.read)

    def _export_moments(self, kind: str) -> Iterator[tuple[str, Tensor]]:
        assert self._optimizer is not None
        return export_moments(self.module, self._optimizer, kind, self._moment_specs, self.device)

    def _read_moments(self, kind: str, read: ReadRows) -> None:
        assert self._optimizer is not None
        load_moments(self.module, self._optimizer, kind, read, self._moment_specs, self.device)

    def _steps(self) -> dict[str, int]:
        assert self._optimizer is not None
        return steps_of(self._optimizer, learning_parameters(self.module))

    def _set_steps(self, progress: Progress) -> None:
        assert self._optimizer is not None
        parameters = learning_parameters(self.module)
        set_steps(self._optimizer, {name: p for name, p in parameters.items() if p in self._optimizer.state}, progress.steps)
        if self._offloads_state:
            move_state(self._optimizer, torch.device("cpu"))
