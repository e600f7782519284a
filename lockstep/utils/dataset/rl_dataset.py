"""verl's path to `lockstep.data.rl_dataset`."""

from lockstep.data.rl_dataset import RLHFDataset

__all__ = ["RLHFDataset"]
