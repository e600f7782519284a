"""What torchtitan 0.3.0 expects of its surroundings when it is imported. `prepare_import` comes before the first `import torchtitan`.

Nothing here changes torch or triton for anyone else: what is set are names of torchtitan's own modules, and one name that torch 2.11 and
2.12 do not have.
"""

import sys
from importlib.util import find_spec
from types import ModuleType

import torch
import torch.distributed.fsdp


def prepare_import(device: torch.device) -> None:
    """Make torchtitan importable here, and make its meshes those of `device`."""
    if find_spec("triton") is None:
        _leave_out_async_experts()
    new_in_torch_2_13 = "DataParallelMeshDims"
    if not hasattr(torch.distributed.fsdp, new_in_torch_2_13):
        # torchtitan imports it for annotations; with spmd_backend="partial_dtensor" none is ever made.
        setattr(torch.distributed.fsdp, new_in_torch_2_13, type(new_in_torch_2_13, (), {}))
    # torchtitan asks torch once which accelerator there is, takes CUDA where there is none, and makes its meshes of that device;
    # its other modules copy the answer when they are imported.
    from torchtitan.tools import utils

    utils.device_type = device.type
    utils.device_module = getattr(torch, device.type)


def _leave_out_async_experts() -> None:
    """Stand in for the one part of torchtitan that needs triton, an expert dispatcher, which is imported with every model.

    Dense models never call it. Names that are asked for raise where they are used, not where they are imported.
    """
    package = "torchtitan.distributed.minimal_async_ep"
    if package in sys.modules:
        return

    def unavailable(*args: object, **kwargs: object) -> None:
        raise ImportError(f"{package} needs triton, which is not installed")

    module = ModuleType(package)
    for name in ("combine_op", "dispatch_op", "init_buffer"):
        setattr(module, name, unavailable)
    module.MinimalAsyncEPDispatchMetadata = type("MinimalAsyncEPDispatchMetadata", (), {})  # type: ignore[attr-defined]
    sys.modules[package] = module
