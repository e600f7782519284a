"""FSDPEngine: a Hugging Face module sharded by FSDP or FSDP2, with AdamW."""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from transformers import PreTrainedModel

from lockstep.config.engine import FSDPConfig, OptimConfig
from lockstep.errors import DataError, NumericalError
from lockstep.models.flops import model_cost
from lockstep.models.load import Head
from lockstep.models.meta import WeightFiles, WeightSource
from lockstep.models.token_head import gives_logits_unchanged, install_token_head
from lockstep.models.weight_file import write_weights
from lockstep.workers.engine.base import OptimResult, TrainEngine
from lockstep.workers.engine.fsdp import sharding
from lockstep.workers.engine.optim import learning_rate, move_state
from lockstep.workers.engine.precision import compute_dtype

WEIGHTS = "model.safetensors"
OPTIMIZER = "optimizer"
PROGRESS = "optimizer_progress.json"
_BY_NAME = StateDictOptions(flatten_optimizer_state_dict=True)
"""Which parameters are in one group of the optimizer depends on the layout; a checkpoint holds what belongs to each by its name."""


class FSDPEngine(TrainEngine):
    """See TrainEngine. `version` 1 is FullyShardedDataParallel, 2 is fully_shard.

    `source` fills a `module` on the meta device.
    """

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
        meshes = sharding.make_meshes(config, device)
        self.gradient_ranks = meshes.data.size()
        if meshes.tensor is not None:
            self.model_group = meshes.tensor.get_group()
            self.reports = meshes.tensor.get_local_rank() == 0
        self.hf_config = module.config
        self.hf_config.architectures = [type(module).__name__]
        self.generation_config = module.generation_config if module.can_generate() else None
        if optim is None:
            module.requires_grad_(False)
        self._specs = {
            name: (tensor.dtype, tuple(tensor.shape))
            for name, tensor in (*module.named_parameters(), *sharding.saved_buffers(module))
        }
        self.cost = model_cost(module)
        self.dtype = compute_dtype(config.dtype, device)
        token_head = install_token_head(module) if head is Head.LANGUAGE_MODEL else None
        self.module = sharding.shard(module, version, self.dtype, config, meshes, device, source)
        if token_head is not None and gives_logits_unchanged(self.module, token_head, device):
            self.token_head = token_head
        self._optim, self._total_updates, self._updates = optim, total_updates, 0
        self._offload = config.optimizer_offload
        self._optimizer = (
            torch.optim.AdamW(
                [{"params": parameters} for parameters in sharding.by_mesh(self.module.parameters())],
                lr=optim.lr,
                betas=(optim.betas[0], optim.betas[1]),
                weight_decay=optim.weight_decay,
                fused=True,
            )
            if optim
            else None
        )

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
        yield from sharding.whole_tensors(self.module)

    def save(self, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)
        tensors = self.export_weights()  # one at a time: gathering is for all ranks, writing for the first
        if self.rank == 0:
            self.hf_config.save_pretrained(path)
            if self.generation_config is not None:  # the stop tokens of chat models are listed there
                self.generation_config.save_pretrained(path)
            write_weights(path / WEIGHTS, self._specs, tensors)
            (path / PROGRESS).write_text(json.dumps({"updates": self._updates}))
        else:
            deque(tensors, maxlen=0)
        if self._optimizer is not None:
            dcp.save(
                {"optim": get_optimizer_state_dict(self.module, self._optimizer, options=_BY_NAME)}, checkpoint_id=path / OPTIMIZER
            )

    def load(self, path: Path) -> None:
        if not (path / WEIGHTS).is_file():
            raise DataError(f"{path} is not a checkpoint: {WEIGHTS} is missing")
        files = WeightFiles(path)
        self._check_architecture(path, files.shapes)
        sharding.fill(self.module, files.read)
        if self._optimizer is None:
            return
        state = {"optim": get_optimizer_state_dict(self.module, self._optimizer, options=_BY_NAME)}
        # Flattening sharded tensors (the planner's default, for FSDP over tensor parallelism) drops, on the ranks that hold nothing of
        # it, a tensor with fewer rows than there are ranks: FSDP1 could not load a value head.
        dcp.load(state, checkpoint_id=path / OPTIMIZER, planner=DefaultLoadPlanner(flatten_sharded_tensors=False))
        set_optimizer_state_dict(self.module, self._optimizer, state["optim"], options=_BY_NAME)
        self._updates = json.loads((path / PROGRESS).read_text())["updates"]

    def _check_architecture(self, path: Path, found: dict[str, tuple[int, ...]]) -> None:
        other = [name for name, (_, shape) in self._specs.items() if found.get(name) != shape]
        if other:
            name = other[0]
            raise DataError(
                f"{path} is a checkpoint of another architecture: {len(other)} of {len(self._specs)} weights differ, first {name} with "
                f"shape {found.get(name, 'none')} instead of {self._specs[name][1]}; resume with the model that wrote it, or set "
                "trainer.resume_mode=disable"
            )
