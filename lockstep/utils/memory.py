"""How much memory is free."""

from pathlib import Path

import psutil
import torch

_CGROUP = Path("/sys/fs/cgroup")


def available_ram(cgroup: Path = _CGROUP) -> int:
    """Bytes that this process can still take: what the machine has free, or what its container may still use if that is less."""
    free = psutil.virtual_memory().available
    try:
        limit = (cgroup / "memory.max").read_text().strip()
        used = int((cgroup / "memory.current").read_text())
    except (OSError, ValueError):  # no container, or another kind
        return free
    return free if limit == "max" else min(free, max(0, int(limit) - used))


def free_device_memory(device: torch.device) -> int | None:
    """Bytes that this process can still take on a GPU: what is free, or what torch's limit for the process leaves if that is less.

    None for a CPU, where this is `available_ram`. What the allocator holds without using it counts as taken.
    """
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    allowed = int(total * torch.cuda.get_per_process_memory_fraction(device))
    return min(free, max(0, allowed - torch.cuda.memory_reserved(device)))
