"""verl's path to `lockstep.data`."""

from lockstep.data.schedule import PromptSchedule
from lockstep.utils.dataset.rl_dataset import RLHFDataset

__all__ = ["PromptSchedule", "RLHFDataset"]
