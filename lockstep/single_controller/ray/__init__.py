"""Workers as Ray actors. Importing this does not import Ray; using it without Ray raises MissingExtra."""

from lockstep.single_controller.ray.cluster import connect, disconnect, is_connected
from lockstep.single_controller.ray.worker_group import RayWorkerGroup

__all__ = ["RayWorkerGroup", "connect", "disconnect", "is_connected"]
