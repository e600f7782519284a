"""The kind of device that a run uses, and how much memory is free on it and on the machine."""

from pathlib import Path

import psutil
import torch

from lockstep.errors import ResourceError


def resolve_device(name: str) -> str:
    """Return "cpu" or "cuda" for a value of trainer.device. Raise ResourceError for cuda on a machine without a GPU."""
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise ResourceError(
            f"trainer.device=cuda, but torch {torch.__version__} sees no GPU here; use trainer.device=cpu (or auto), "
            "or install a CUDA build of torch and check nvidia-smi"
        )
    if name != "auto":
        return name
    return "cuda" if available else "cpu"


_CGROUP = Path("/sys/fs/cgroup")


def available_ram(cgroup: Path = _CGROUP) -> int:
    """Return the bytes that this process can still take: those free on the machine, or left to its container if that is less."""
    free = psutil.virtual_memory().available
    try:
        limit = (cgroup / "memory.max").read_text().strip()
        used = int((cgroup / "memory.current").read_text())
    except (OSError, ValueError):  # no container, or another kind
        return free
    return free if limit == "max" else min(free, max(0, int(limit) - used))


def free_device_memory(device: torch.device) -> int | None:
    """Return the bytes that this process can still take on a GPU: those free, or left by torch's limit for the process if that is less.

    None for a CPU (see `available_ram`). Memory that the allocator holds unused counts as taken.
    """
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    allowed = int(total * torch.cuda.get_per_process_memory_fraction(device))
    return min(free, max(0, allowed - torch.cuda.memory_reserved(device)))
