"""From files of prompts to the rows of a training step."""

from lockstep.utils.dataset.rl_dataset import RLHFDataset
from lockstep.utils.dataset.schedule import PromptSchedule

__all__ = ["PromptSchedule", "RLHFDataset"]
