"""Weights into a module of its own, and the manifest of what is in it."""

from torch import Tensor, nn

from lockstep.errors import WeightSyncError
from lockstep.workers.weight_sync.base import Manifest, Weights, describe


def copy_weights(module: nn.Module, weights: Weights) -> None:
    """Copy (Hugging Face name, tensor) pairs into a module, in place. Raises WeightSyncError unless every parameter gets a value, for a
    name that the module does not have, and for another shape."""
    targets = _targets(module)
    missing = set(parameter_slots(module))
    for name, tensor in weights:
        target = targets.get(name)
        if target is None:
            raise WeightSyncError(f"the weight update has {name}, which {type(module).__name__} does not have")
        if target.shape != tensor.shape:
            raise WeightSyncError(f"the weight update has {name} of shape {list(tensor.shape)}, the model {list(target.shape)}")
        target.copy_(tensor)
        missing.discard(name)
    if missing:
        raise WeightSyncError(f"the weight update left {len(missing)} parameters out, first {sorted(missing)[:3]}")


def module_manifest(module: nn.Module, names: Manifest) -> Manifest:
    """What the module has under these names."""
    targets = _targets(module)
    return {name: describe(targets[name]) for name in names}


def parameter_slots(module: nn.Module) -> dict[str, list[tuple[nn.Module, str]]]:
    """For each parameter, by the first of its names, every (module, attribute) that holds it: tied weights have several."""
    names: dict[int, str] = {}
    slots: dict[str, list[tuple[nn.Module, str]]] = {}
    for prefix, part in module.named_modules():
        for attribute, parameter in part._parameters.items():
            if parameter is not None:
                name = names.setdefault(id(parameter), f"{prefix}.{attribute}" if prefix else attribute)
                slots.setdefault(name, []).append((part, attribute))
    return slots


def _targets(module: nn.Module) -> dict[str, Tensor]:
    """Parameters (a tied one under the first of its names) and buffers."""
    return {name: parameter.data for name, parameter in module.named_parameters()} | dict(module.named_buffers())
