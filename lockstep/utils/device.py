"""Which kind of device a run uses."""

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
