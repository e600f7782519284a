"""verl's path to `lockstep.data`."""

from lockstep.data.rl_dataset import RLHFDataset
from lockstep.data.schedule import PromptSchedule

__all__ = ["PromptSchedule", "RLHFDataset"]
