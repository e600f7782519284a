"""FSDPEngine: a Hugging Face module sharded by FSDP or FSDP2, with AdamW."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from transformers import PreTrainedModel

from lockstep.config.engine import FSDPConfig, OptimConfig
from lockstep.errors import ConfigError, DataError, NumericalError
from lockstep.models.attention import PACKED
from lockstep.models.flops import model_cost
from lockstep.models.load import Head
from lockstep.models.meta import WeightFiles, WeightSource
from lockstep.models.outputs import packed_scores
from lockstep.models.token_head import gives_logits_unchanged, install_token_head
from lockstep.protocol import Ragged
from lockstep.workers.engine.base import OptimResult, TrainEngine
from lockstep.workers.engine.fsdp import sharding
from lockstep.workers.engine.optim import learning_rate, move_state
from lockstep.workers.engine.packing import PackedRows, pack_sequences
from lockstep.workers.engine.precision import compute_dtype
from lockstep.workers.engine.sequence import compute_divided, sequence_group

WEIGHTS = "model.safetensors"
OPTIMIZER = "optimizer"
PROGRESS = "optimizer_progress.json"


class FSDPEngine(TrainEngine):
    """See TrainEngine. `version` 1 is FullyShardedDataParallel, 2 is fully_shard.

    `source` fills a `module` on the meta device. With `config.ulysses_sequence_parallel_size` the ranks of a group have a part of the
    tokens of a micro-batch each; whatever it says, a gradient is the mean over all ranks.
    """

    score_layer: nn.Module | None = None
    """The last layer of a score head whose rows are packed; without it they are padded."""

    def __init__(
        self,
        module: PreTrainedModel,
        head: Head,
        *,
        version: int,
        config: FSDPConfig,
        optim: OptimConfig | None,
        total_updates: int,
        device: torch.device,
        source: WeightSource | None = None,
    ) -> None:
        self.head, self.device, self._version = head, device, version
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.gradient_ranks = self.world_size
        self.token_ranks = config.ulysses_sequence_parallel_size
        self.model_group = sequence_group(self.token_ranks, device)
        self.reports = self.rank % self.token_ranks == 0
        self.hf_config = module.config
        self.hf_config.architectures = [type(module).__name__]
        self.generation_config = module.generation_config if module.can_generate() else None
        if optim is None:
            module.requires_grad_(False)
        self._shapes = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
        self._tied: dict[str, str] = dict(module.all_tied_weights_keys or {})
        self.cost = model_cost(module)
        self.dtype = compute_dtype(config.dtype, device)
        token_head = install_token_head(module) if head is Head.LANGUAGE_MODEL else None
        if head is Head.SCORE and self.model_group is not None:
            self.score_layer = pack_score_head(module)
        self.module = self._shard(module, config, source)
        if token_head is not None and gives_logits_unchanged(self.module, token_head, device):
            self.token_head = token_head
        sharding.reshard(self.module)  # AdamW has to get the shards
        self._optim, self._total_updates, self._updates = optim, total_updates, 0
        self._offload = config.optimizer_offload
        self._optimizer = (
            torch.optim.AdamW(
                self.module.parameters(),
                lr=optim.lr,
                betas=(optim.betas[0], optim.betas[1]),
                weight_decay=optim.weight_decay,
                fused=True,
            )
            if optim
            else None
        )

    def _shard(self, module: PreTrainedModel, config: FSDPConfig, source: WeightSource | None) -> nn.Module:
        return sharding.shard(module, self._version, self.dtype, config, self.device, source)

    def columns(self, packs: Sequence[PackedRows], temperature: float) -> Iterator[dict[str, Tensor]]:
        yield from super().columns(packs, temperature)
        sharding.reshard(self.module)

    def _run(self, packed: PackedRows, temperature: float, entropy_grad: bool = False) -> dict[str, Tensor]:
        return self._divided(packed, functools.partial(super()._run, temperature=temperature, entropy_grad=entropy_grad))

    def scores(self, rows: Ragged, pad_token_id: int) -> Tensor:
        if self.score_layer is None:
            return super().scores(rows, pad_token_id)
        packed = pack_sequences(rows, pad_token_id, self.device)
        return self._divided(packed, functools.partial(self._packed_scores, self.score_layer))["scores"]

    def _packed_scores(self, score: nn.Module, packed: PackedRows) -> dict[str, Tensor]:
        inputs = (packed.input_ids, packed.position_ids, packed.layout, packed.predict_at)
        return {"scores": packed_scores(self.module, score, *inputs)}

    def _divided(self, packed: PackedRows, compute: Callable[[PackedRows], dict[str, Tensor]]) -> dict[str, Tensor]:
        """The columns of a micro-batch, computed by this rank or by those that divide its tokens."""
        return compute(packed) if self.model_group is None else compute_divided(packed, self.model_group, compute)

    def gradient_sync(self, enabled: bool) -> AbstractContextManager[None]:
        return sharding.gradient_sync(self.module, enabled)

    def optim_step(self) -> OptimResult:
        assert self._optimizer is not None, "a frozen engine cannot learn"
        assert self._optim is not None
        norm = sharding.clip_grad_norm(self.module, self._optim.clip_grad or math.inf)
        if not math.isfinite(norm):
            self._optimizer.zero_grad()
            raise NumericalError(f"the gradient norm is {norm} at update {self._updates}; no weight was changed")
        lr = learning_rate(self._updates, self._total_updates, self._optim)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        if self._offload:
            move_state(self._optimizer, self.device)
        self._optimizer.step()
        self._optimizer.zero_grad()
        if self._offload:
            move_state(self._optimizer, torch.device("cpu"))
        self._updates += 1
        return OptimResult(grad_norm=norm, lr=lr)

    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        sharding.reshard(self.module)
        if self.world_size == 1:
            yield from sharding.own_tensors(self.module)
            return
        if self._version == 2:
            yield from sharding.gathered_tensors(self.module)
            return
        full: dict[str, Any] = get_model_state_dict(self.module, options=StateDictOptions(full_state_dict=True))
        yield from ((name, tensor) for name, tensor in full.items() if name not in self._tied)

    def save(self, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)
        tensors = {}
        for name, tensor in self.export_weights():  # gathering is for all ranks, keeping for the one that writes
            if self.rank == 0:
                tensors[name] = tensor.contiguous().cpu()
        if self.rank == 0:
            self.hf_config.save_pretrained(path)
            if self.generation_config is not None:  # the stop tokens of chat models are listed there
                self.generation_config.save_pretrained(path)
            save_file(tensors, path / WEIGHTS, metadata={"format": "pt"})
            (path / PROGRESS).write_text(json.dumps({"updates": self._updates}))
        del tensors
        if self._optimizer is not None:
            dcp.save({"optim": get_optimizer_state_dict(self.module, self._optimizer)}, checkpoint_id=path / OPTIMIZER)

    def load(self, path: Path) -> None:
        if not (path / WEIGHTS).is_file():
            raise DataError(f"{path} is not a checkpoint: {WEIGHTS} is missing")
        files = WeightFiles(path)
        self._check_architecture(path, files.shapes)
        sharding.reshard(self.module)
        if self._version == 2 and not any(sharding.saved_buffers(self.module)):
            sharding.read_shards(self.module, files.read)
        else:
            weights: dict[str, Any] = load_file(path / WEIGHTS)
            for tied, source in self._tied.items():
                weights.setdefault(tied, weights[source])
            set_model_state_dict(self.module, weights, options=StateDictOptions(full_state_dict=True))
        if self._optimizer is None:
            return
        state = {"optim": get_optimizer_state_dict(self.module, self._optimizer)}
        # Flattening sharded tensors (the planner's default, for FSDP over tensor parallelism) drops, on the ranks that hold nothing of
        # it, a tensor with fewer rows than there are ranks: FSDP1 could not load a value head.
        dcp.load(state, checkpoint_id=path / OPTIMIZER, planner=DefaultLoadPlanner(flatten_sharded_tensors=False))
        set_optimizer_state_dict(self.module, self._optimizer, state["optim"])
        self._updates = json.loads((path / PROGRESS).read_text())["updates"]

    def _check_architecture(self, path: Path, found: dict[str, tuple[int, ...]]) -> None:
        other = [name for name, shape in self._shapes.items() if found.get(name) != shape]
        if other:
            name = other[0]
            raise DataError(
                f"{path} is a checkpoint of another architecture: {len(other)} of {len(self._shapes)} weights differ, first {name} with "
                f"shape {found.get(name, 'none')} instead of {self._shapes[name]}; resume with the model that wrote it, or set "
                "trainer.resume_mode=disable"
            )


def pack_score_head(module: PreTrainedModel) -> nn.Module:
    """Make a model with a score head attend to packed rows; returns the layer that gives a score for every token.

    Raises ConfigError where the model has none.
    """
    layer = getattr(module, "score", None)
    if not isinstance(layer, nn.Linear):
        raise ConfigError(
            f"{type(module).__name__} has no linear layer named score, which dividing its tokens among ranks needs; "
            "set fsdp_config.ulysses_sequence_parallel_size=1"
        )
    module.set_attn_implementation(PACKED)
    return layer
