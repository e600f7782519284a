"""Workers in the driver's own process."""

from lockstep.single_controller.local.worker_group import LocalWorkerGroup

__all__ = ["LocalWorkerGroup"]
