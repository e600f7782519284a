"""Which kind of device a run uses."""

from types import ModuleType

import torch

from lockstep.errors import ResourceError


def resolve_device(name: str) -> str:
    """ "cpu" or "cuda" for trainer.device. Raises ResourceError when cuda is asked for and there is none."""
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise ResourceError(
            f"trainer.device=cuda, but torch {torch.__version__} sees no GPU here; use trainer.device=cpu (or auto), "
            "or install a CUDA build of torch and check nvidia-smi"
        )
    return name if name != "auto" else "cuda" if available else "cpu"


def get_device_name() -> str:
    """ "cuda" where there is a GPU, else "cpu"."""
    return resolve_device("auto")


def get_torch_device() -> ModuleType:
    """torch.cuda or torch.cpu."""
    return torch.cuda if torch.cuda.is_available() else torch.cpu


def get_device_id() -> int:
    """The number of this process's device."""
    return torch.cuda.current_device() if torch.cuda.is_available() else 0


def get_nccl_backend() -> str:
    """The name of torch.distributed's backend for the device."""
    return "nccl" if torch.cuda.is_available() else "gloo"
