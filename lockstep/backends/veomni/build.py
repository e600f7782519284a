"""What is asked of VeOmni: a layout of ranks, a model without weights, and its sharding.

Traps that are handled here, seen with VeOmni 0.1.12: it logs to the terminal from its first line on (the level is read from the
environment, once); the layout is one for the process, and a second one is ignored with a warning; `build_parallelize_model` refuses a
single rank, so what it calls for FSDP2 is called; its fused kernels are the default and fail where they are not installed; it writes into
the config that it is given.
"""

import copy
import dataclasses
import io
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel

from lockstep.backends.veomni.check import copy_ranks
from lockstep.config.engine import VeOmniConfig
from lockstep.errors import ConfigError
from lockstep.models.attention import PACKED
from lockstep.models.load import refuse_long_rows
from lockstep.utils.quiet import quiet_transformers

_laid_out: dist.ProcessGroup | None = None
"""The ranks that VeOmni's layout is of."""
_VERBOSITY = "VEOMNI_VERBOSITY"
_LIGER_OPS = ("rms_norm", "swiglu_mlp", "rotary_pos_emb")
"""What the families use of Liger's kernels; losses are our own."""


@contextmanager
def quiet_veomni() -> Iterator[None]:
    """Import VeOmni inside: it then logs nothing below an error, now and later. A level that the user has set stays."""
    if _VERBOSITY in os.environ:
        yield
        return
    os.environ[_VERBOSITY] = "ERROR"
    try:
        yield
    finally:
        del os.environ[_VERBOSITY]


def lay_out(section: VeOmniConfig, device: torch.device) -> None:
    """Tell VeOmni how the ranks share the work. Raises ConfigError where this process has another layout already."""
    with quiet_veomni():
        from veomni.distributed import parallel_state
        from veomni.utils.device import get_device_type
    if get_device_type() != device.type:
        raise ConfigError(
            f"strategy=veomni computes on {get_device_type()} here, and {device.type} was asked for; set strategy=fsdp2"
        )
    world = dist.get_world_size()
    copy_size = copy_ranks(section, world)
    sequence = section.ulysses_parallel_size
    layout = {
        "dp_size": world // sequence,
        "dp_replicate_size": world // copy_size,
        "dp_shard_size": copy_size // sequence,
        "ulysses_size": sequence,
    }
    global _laid_out
    if _laid_out is not dist.group.WORLD:  # the groups of ranks that have been taken down since are of no use
        parallel_state.clear_parallel_state()
        parallel_state.init_parallel_state(**layout, dp_mode="fsdp2", device_type=device.type)
        _laid_out = dist.group.WORLD
        return
    there = parallel_state.get_parallel_state()
    found = {name: getattr(there, name) for name in layout}
    if found != layout:
        raise ConfigError(
            f"VeOmni has one layout of ranks in a process, and here it is {found} already, not {layout}; give all models of strategy "
            "veomni in one pool the same veomni.fsdp_size and veomni.ulysses_parallel_size"
        )


def build_model(plain: PreTrainedModel, device: torch.device) -> PreTrainedModel:
    """VeOmni's class of the model `plain` of transformers: the same parameters on the meta device, our attention, evaluation mode."""
    with quiet_veomni():
        from veomni.arguments import OpsImplementationConfig
        from veomni.models.auto import build_foundation_model
    hf_config = copy.deepcopy(plain.config)
    hf_config.architectures = [type(plain).__name__]
    hf_config._experts_implementation = "eager"  # VeOmni has its own choice, below; transformers refuses others in its classes
    fused = device.type == "cuda" and find_spec("liger_kernel") is not None and hf_config.hidden_act == "silu"
    choice: dict[str, Any] = {f.name: "eager" for f in dataclasses.fields(OpsImplementationConfig)}
    choice |= {"attn_implementation": "sdpa", "qat_implementation": "none"}
    choice |= {f"{op}_implementation": "liger_kernel" for op in _LIGER_OPS if fused}
    # transformers prints, to standard output, that arguments of VeOmni's classes are not documented.
    with quiet_transformers(), redirect_stdout(io.StringIO()):
        model = build_foundation_model(
            config_path=hf_config,
            weights_path=str(hf_config.name_or_path),  # with one it draws no weights and ties embeddings; nothing is read from it
            torch_dtype="float32",
            init_device="meta",
            ops_implementation=OpsImplementationConfig(**choice),
        )
    model.set_attn_implementation(PACKED)
    refuse_long_rows(model)
    return model.eval()


def shard_model(model: PreTrainedModel, dtype: torch.dtype) -> nn.Module:
    """Shard the model layer by layer with FSDP2, over the layout of `lay_out`. Its shards are there and hold nothing yet."""
    with quiet_veomni():
        from veomni.arguments import MixedPrecisionConfig
        from veomni.distributed.torch_parallelize import parallelize_model_fsdp2
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", "Slicing a flattened dim from root mesh", UserWarning
        )  # torch, of how VeOmni asks for its mesh
        return parallelize_model_fsdp2(
            model,
            enable_reshard_after_forward=dist.get_world_size() > 1,  # one rank has every weight anyway
            mixed_precision=MixedPrecisionConfig(enable=dtype != torch.float32, param_dtype="bfloat16", reduce_dtype="float32"),
            should_skip_hf_weight_load=True,
            init_device="meta",
        )
