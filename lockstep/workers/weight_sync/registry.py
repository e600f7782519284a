"""Which sender stands behind a method's name (lockstep.config.weight_sync chooses the name)."""

from __future__ import annotations

import torch

from lockstep.config.actor_rollout_ref import RolloutConfig
from lockstep.workers.weight_sync.base import WeightSender


def make_sender(method: str, config: RolloutConfig, version: int, num_receivers: int, device: torch.device) -> WeightSender:
    """A sender for one sync from this process, which has the weights on `device`, to workers in other ones."""
    if method == "ipc":
        from lockstep.workers.weight_sync.ipc import IPCSender

        return IPCSender(version)
    if method == "broadcast":
        from lockstep.workers.weight_sync.broadcast import BroadcastSender

        return BroadcastSender(version, num_receivers, device)
    assert method == "disk", method
    from lockstep.workers.weight_sync.disk import DiskSender

    return DiskSender(version, config.weight_sync_dir)
