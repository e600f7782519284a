"""VeOmniEngine: VeOmni's model classes, sharded by VeOmni with FSDP2."""

from torch import nn
from transformers import PreTrainedModel

from lockstep.backends.veomni.build import build_model, lay_out, shard_model
from lockstep.config.engine import FSDPConfig, VeOmniConfig
from lockstep.models.load import Head, check_packing
from lockstep.models.recompute import apply_recompute
from lockstep.models.scores import read_scores
from lockstep.models.weight_files import WeightSource
from lockstep.workers.engine.checkpoint import ModelFolder
from lockstep.workers.engine.fsdp import sharding
from lockstep.workers.engine.fsdp.engine import FSDPEngine
from lockstep.workers.engine.spec import EngineSpec, compute_dtype


class VeOmniEngine(FSDPEngine):
    """See TrainEngine. Its parameters are those of FSDP2 under transformers' names, so optimizer, checkpoints and export are shared.

    Of the model as transformers builds it only the shapes, the config and the weights are used.
    """

    def __init__(self, config: VeOmniConfig, spec: EngineSpec) -> None:
        plain, source = spec.load()
        device = spec.device
        lay_out(config, device)
        module = build_model(plain, device)
        apply_recompute(module, spec.recompute(plain, compute_dtype(config.dtype, device)))
        if spec.head is Head.SCORE:
            read_scores(module)
        fsdp = FSDPConfig(dtype=config.dtype, ulysses_sequence_parallel_size=config.ulysses_parallel_size)
        super().__init__(module, spec, version=2, config=fsdp, source=source)
        self.folder = ModelFolder.of(plain)
        assert isinstance(self.module, PreTrainedModel)
        check_packing(self.module, self.module, str(spec.model.path), device, self.dtype)
        sharding.reshard(self.module)
        self.decoder = spec.decoder(plain)

    def _shard(
        self, module: PreTrainedModel, config: FSDPConfig, meshes: sharding.Meshes, source: WeightSource | None
    ) -> nn.Module:
        assert source is not None
        module.register_forward_hook(sharding.own_logits)  # before FSDP's own hook, which looks at the output
        sharded = shard_model(module, self.dtype)
        sharding.fill(sharded, source.read)
        return sharded
