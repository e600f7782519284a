"""How much memory is free."""

from __future__ import annotations

from pathlib import Path

import psutil

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
