"""A model that FSDP or FSDP2 shards, or one rank has whole, as the few operations of a step that differ; sharding.py makes and fills one.

Traps that are handled here, all seen on CPU with torch 2.13: with FSDP1 a full state dict with CPU offload of a CPU model is a
segmentation fault (weights are gathered one unit at a time instead). FSDP2 hangs its pre-backward hook on the model's outputs and warns
about one that is a view, which a head with a bias returns (`own_logits` makes it a tensor of its own).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from lockstep.workers.engine import sharded
from lockstep.workers.engine.fsdp.whole_model import WholeModel


def own_logits(module: nn.Module, args: Any, output: Any) -> None:
    """A forward hook that makes the model's logits a tensor of their own where they are a view."""
    logits = getattr(output, "logits", None)  # none where hidden states were handed out
    if logits is not None and logits.requires_grad and logits._is_view():
        output.logits = logits.clone()


def reshard(module: nn.Module) -> None:
    """Free what forward passes without a backward pass have gathered: it would not follow the next update."""
    for part in module.modules():
        if isinstance(part, FSDPModule | WholeModel):
            part.reshard()


@contextmanager
def gradient_sync(module: nn.Module, enabled: bool, keep_gathered: bool) -> Iterator[None]:
    """Reduce gradients over the ranks in backward passes inside, or only add them up locally.

    With `keep_gathered` whole parameters stay until the pass that reduces (FSDP2): the passes before it gather nothing again.
    """
    if isinstance(module, FullyShardedDataParallel) and not enabled:
        with module.no_sync():
            yield
        return
    if isinstance(module, FSDPModule):
        module.set_requires_gradient_sync(enabled)
        module.set_reshard_after_backward(enabled or not keep_gathered)
    yield
    if isinstance(module, WholeModel) and enabled:
        module.reshard()


def clip_grad_norm(module: nn.Module, max_norm: float) -> float:
    """Scale the whole gradient down to `max_norm`; returns its norm before."""
    if isinstance(module, FullyShardedDataParallel):
        return float(module.clip_grad_norm_(max_norm))
    return sharded.clip_grad_norm((p.grad for p in module.parameters() if p.grad is not None), max_norm)


def all_names(name: str) -> bool:
    """Chooses everything."""
    return True


def whole_tensors(module: nn.Module, chosen: Callable[[str], bool] = all_names) -> Iterator[tuple[str, Tensor]]:
    """(name, whole tensor) of the `chosen` parameters and saved buffers. A collective: every rank takes all of them.

    What is sharded is gathered one parameter (FSDP2) or one layer (FSDP1) at a time. A parameter that this rank has whole is given as
    it is, not as a copy.
    """
    if isinstance(module, FullyShardedDataParallel):
        for name, parameter in whole_units(module, writeback=False):
            if chosen(name):
                yield name, parameter.detach().clone()
    else:
        reshard(module)
        yield from ((name, sharded.whole_tensor(p)) for name, p in module.named_parameters() if chosen(name))
    yield from ((name, buffer) for name, buffer in saved_buffers(module) if chosen(name))


def whole_units(module: FullyShardedDataParallel, writeback: bool) -> Iterator[tuple[str, nn.Parameter]]:
    """(Hugging Face name, whole parameter) of what FSDP1 gathers at once, one unit after the other, the root first; a tied one comes
    once. With `writeback` what is written to it is kept."""
    for prefix, unit in module.named_modules():
        if isinstance(unit, FullyShardedDataParallel):
            with FullyShardedDataParallel.summon_full_params(unit, recurse=False, writeback=writeback):
                inner = [m for m in unit.modules() if m is not unit and isinstance(m, FullyShardedDataParallel)]
                inside = {id(parameter) for m in inner for parameter in m.parameters()}
                for name, parameter in unit.named_parameters(prefix=prefix):
                    if id(parameter) not in inside:
                        yield hf_name(name), parameter


def hf_name(name: str) -> str:
    """The name of a parameter without what FSDP1 puts into it."""
    return name.replace("_fsdp_wrapped_module.", "")


def saved_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(Hugging Face name, tensor) of the buffers that belong to a checkpoint."""
    for prefix, part in module.named_modules():
        for name, buffer in part.named_buffers(recurse=False):
            if name not in part._non_persistent_buffers_set:
                yield hf_name(f"{prefix}.{name}".removeprefix(".")), buffer
